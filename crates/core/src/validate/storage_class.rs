//! StorageClasses of Azure's disk driver: disks that no machine can attach.

use std::collections::BTreeMap;

use super::FieldError;

/// The driver of Azure's managed disks.
pub const PROVISIONER: &str = "disk.csi.azure.com";

/// The kinds of disks that take no caching.
const WITHOUT_CACHING: [&str; 2] = ["UltraSSD_LRS", "PremiumV2_LRS"];

/// Compares the parameters of a class with what Azure attaches. The driver reads keys and values in any case, and caches a disk
/// whose class says nothing.
pub fn validate(parameters: &BTreeMap<String, String>) -> Option<FieldError> {
    let get = |wanted: &str| {
        let found = parameters.iter().find(|(key, _)| key.eq_ignore_ascii_case(wanted));
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    };
    let kind = get("skuName").or_else(|| get("storageAccountType"))?;
    if !WITHOUT_CACHING.iter().any(|known| kind.eq_ignore_ascii_case(known)) {
        return None;
    }
    let detail = format!("must be None for {kind}: Azure attaches such a disk to no machine otherwise, and pods wait");
    match get("cachingMode") {
        Some(mode) if mode.eq_ignore_ascii_case("None") => None,
        Some(mode) => Some(FieldError::invalid("parameters.cachingMode", mode, detail)),
        None => Some(FieldError::required("parameters.cachingMode", detail)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::ultra(&[("skuName", "UltraSSD_LRS"), ("cachingMode", "None")], None)]
    #[case::in_any_case(&[("SKUNAME", "ultrassd_lrs"), ("cachingmode", "none")], None)]
    #[case::says_nothing(&[("skuName", "UltraSSD_LRS")], Some("parameters.cachingMode: Required value: must be None for UltraSSD_LRS"))]
    #[case::caches(&[("skuname", "PremiumV2_LRS"), ("CachingMode", "ReadOnly")], Some("parameters.cachingMode: Invalid value: \"ReadOnly\""))]
    #[case::by_the_other_key(&[("storageAccountType", "UltraSSD_LRS")], Some("Required value"))]
    #[case::another_kind(&[("skuName", "Premium_LRS")], None)]
    #[case::no_kind(&[], None)]
    fn disks_that_take_no_caching_need_a_class_without_it(
        #[case] parameters: &[(&str, &str)],
        #[case] expected: Option<&str>,
    ) {
        let parameters = parameters
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let found = validate(&parameters.collect()).map(|error| error.to_string());
        match expected {
            None => assert_eq!(found, None),
            Some(part) => assert!(found.as_ref().is_some_and(|found| found.contains(part)), "{found:?}"),
        }
    }
}
