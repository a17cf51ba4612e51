//! Quantities as Kubernetes writes them, in whole units of something. Exact: no number is taken through floating point.

const KILO: i128 = 1000;
const KIBI: i128 = 1024;

/// How many units a quantity comes to, rounded up; `None` for what is no quantity, nothing, or too much to count.
pub fn in_units_of(unit: i64, text: &str) -> Option<i64> {
    let (digits, scale) = split(text.trim())?;
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all: i128 = format!("{whole}{fraction}").parse().ok()?;
    let places = u32::try_from(fraction.len()).ok()?;
    let (times, over) = scale;
    let amount = all.checked_mul(times)?;
    let parts = 10i128
        .checked_pow(places)?
        .checked_mul(over)?
        .checked_mul(i128::from(unit))?;
    let units = amount.checked_add(parts - 1)?.checked_div(parts)?;
    i64::try_from(units).ok().filter(|units| *units > 0)
}

/// The digits, and what they are to be multiplied by and divided by.
fn split(text: &str) -> Option<(&str, (i128, i128))> {
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')))
        .unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let scale = match suffix {
        "" => (1, 1),
        "n" => (1, KILO.pow(3)),
        "u" => (1, KILO.pow(2)),
        "m" => (1, KILO),
        "k" => (KILO, 1),
        "M" => (KILO.pow(2), 1),
        "G" => (KILO.pow(3), 1),
        "T" => (KILO.pow(4), 1),
        "P" => (KILO.pow(5), 1),
        "E" => (KILO.pow(6), 1),
        "Ki" => (KIBI, 1),
        "Mi" => (KIBI.pow(2), 1),
        "Gi" => (KIBI.pow(3), 1),
        "Ti" => (KIBI.pow(4), 1),
        "Pi" => (KIBI.pow(5), 1),
        "Ei" => (KIBI.pow(6), 1),
        _ => exponent(suffix)?,
    };
    (!digits.is_empty()).then_some((digits, scale))
}

fn exponent(suffix: &str) -> Option<(i128, i128)> {
    let power: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let factor = 10i128.checked_pow(power.unsigned_abs())?;
    Some(if power < 0 { (1, factor) } else { (factor, 1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const MHZ: i64 = 1_000_000;
    const MIB: i64 = 1 << 20;

    #[rstest]
    #[case::two_gigahertz(MHZ, "2G", Some(2000))]
    #[case::exact_where_floating_point_is_not(MHZ, "2.2G", Some(2200))]
    #[case::rounded_up(MHZ, "1000001", Some(2))]
    #[case::exponent(MHZ, "1.5e9", Some(1500))]
    #[case::memory(MIB, "4Gi", Some(4096))]
    #[case::decimal_memory(MIB, "1G", Some(954))]
    #[case::a_part_of_a_unit(MIB, "500m", Some(1))]
    #[case::nothing(MIB, "0", None)]
    #[case::negative(MIB, "-1Gi", None)]
    #[case::too_much(1, "9999999999999E", None)]
    #[case::no_quantity(MIB, "much", None)]
    #[case::empty(MIB, "", None)]
    fn a_quantity_is_counted_in_units(#[case] unit: i64, #[case] text: &str, #[case] expected: Option<i64>) {
        assert_eq!(in_units_of(unit, text), expected);
    }
}
