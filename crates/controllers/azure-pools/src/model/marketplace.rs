//! Default images of older Kubernetes versions, which are in Azure's marketplace and not in the community gallery.
//!
//! CAPZ takes these images for the same versions: a pool that it made keeps its machines. The offers are closed, no version is
//! added to them any more.

use capstan_api::azure::{Image, MarketplaceImage};

const PUBLISHER: &str = "cncf-upstream";

/// Kubernetes 1.x.y: x, y, and the days on which its images for Linux and for Windows were made (0: none).
const IMAGES: [(u32, u32, u32, u32); 26] = [
    (27, 14, 20240517, 20240515),
    (27, 15, 20240612, 0),
    (27, 16, 20240717, 0),
    (28, 1, 20230829, 20230830),
    (28, 2, 20230918, 20230918),
    (28, 3, 20231023, 20231023),
    (28, 4, 20231130, 20231122),
    (28, 5, 20240102, 20240102),
    (28, 6, 20240201, 20240201),
    (28, 7, 20240223, 20240223),
    (28, 8, 20240327, 20240327),
    (28, 9, 20240418, 20240418),
    (28, 10, 20240517, 20240515),
    (28, 11, 20240612, 20240612),
    (28, 12, 20240717, 20240717),
    (29, 1, 20240206, 20240201),
    (29, 2, 20240223, 20240223),
    (29, 3, 20240327, 20240327),
    (29, 4, 20240418, 20240418),
    (29, 5, 20240517, 20240515),
    (29, 6, 20240612, 20240612),
    (29, 7, 20240717, 20240717),
    (30, 0, 20240506, 20240418),
    (30, 1, 20240517, 20240515),
    (30, 2, 20240612, 20240612),
    (30, 3, 20240717, 20240717),
];

/// Returns the image of a Kubernetes version such as `1.28.5`, if the marketplace has one.
pub fn image(version: &str, windows: bool) -> Option<Image> {
    let is = |&&(minor, patch, ..): &&(u32, u32, u32, u32)| version == format!("1.{minor}.{patch}");
    let (minor, patch, linux_day, windows_day) = IMAGES.iter().find(is)?;
    let (offer, sku, day) = match windows {
        true => ("capi-windows", "windows-2019-containerd-gen1", *windows_day),
        false => ("capi", "ubuntu-2204-gen1", *linux_day),
    };
    let image = MarketplaceImage {
        publisher: PUBLISHER.to_owned(),
        offer: offer.to_owned(),
        sku: sku.to_owned(),
        version: format!("1{minor}.{patch}.{day}"),
        third_party_image: false,
    };
    (day > 0).then(|| Image {
        marketplace: Some(image),
        ..Image::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::linux("1.28.10", false, Some("capi ubuntu-2204-gen1 128.10.20240517"))]
    #[case::windows("1.28.10", true, Some("capi-windows windows-2019-containerd-gen1 128.10.20240515"))]
    #[case::windows_was_not_made("1.27.15", true, None)]
    #[case::in_the_gallery("1.30.4", false, None)]
    #[case::never_made("1.29.0", false, None)]
    #[case::another_spelling("1.28", false, None)]
    fn older_versions_are_in_the_marketplace(
        #[case] version: &str,
        #[case] windows: bool,
        #[case] expected: Option<&str>,
    ) {
        let found = image(version, windows).and_then(|image| image.marketplace);
        let found = found.map(|image| format!("{} {} {}", image.offer, image.sku, image.version));
        assert_eq!(found.as_deref(), expected);
    }
}
