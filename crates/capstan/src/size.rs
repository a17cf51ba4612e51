//! Sizes of memory on the command line, as Kubernetes writes them: `96Mi`, `1Gi`.

/// Returns the bytes of a size in whole `Ki`, `Mi` or `Gi`.
pub fn parse(text: &str) -> Result<usize, String> {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30)];
    let read = units.iter().find_map(|(unit, bits)| {
        let number: usize = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(1 << bits).filter(|bytes| *bytes > 0)
    });
    read.ok_or_else(|| format!("{text:?} is not a size of memory; write it as 96Mi or 1Gi"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_kubernetes_writes_them() {
        assert_eq!(parse("96Mi"), Ok(96 << 20));
        assert_eq!(parse("1Gi"), Ok(1 << 30));
        for text in ["", "96", "96M", "0Mi", "-1Mi", "Mi", "99999999999999999999Gi", "1.5Gi"] {
            assert!(parse(text).is_err(), "{text:?} was read");
        }
    }
}
