//! The service content: what a vCenter is, and its singletons.

use capstan_core::vm::MoRef;

use crate::error::{Error, Result};
use crate::xml::Element;

/// The name and the versions of a vCenter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    pub name: String,
    pub full_name: String,
    pub version: String,
    pub build: String,
    pub api_version: String,
    pub api_type: String,
    pub instance_uuid: String,
}

/// The singletons that a vCenter has.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    pub about: About,
    pub root_folder: MoRef,
    pub property_collector: MoRef,
    pub session_manager: MoRef,
    pub search_index: Option<MoRef>,
    pub view_manager: Option<MoRef>,
}

impl Content {
    pub fn read(answer: &Element) -> Result<Self> {
        let method = || "RetrieveServiceContent".to_owned();
        let content = answer.child("returnval").ok_or(Error::Incomplete {
            method: method(),
            what: "content",
        })?;
        let need = |name: &'static str| {
            content.moref_at(name).ok_or(Error::Incomplete {
                method: method(),
                what: name,
            })
        };
        let about = |name: &str| content.string_at(&format!("about.{name}")).unwrap_or_default();
        Ok(Self {
            about: About {
                name: about("name"),
                full_name: about("fullName"),
                version: about("version"),
                build: about("build"),
                api_version: about("apiVersion"),
                api_type: about("apiType"),
                instance_uuid: about("instanceUuid"),
            },
            root_folder: need("rootFolder")?,
            property_collector: need("propertyCollector")?,
            session_manager: need("sessionManager")?,
            search_index: content.moref_at("searchIndex"),
            view_manager: content.moref_at("viewManager"),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("7.0.3", "7.0.3.0")]
    #[case("8.0.3", "8.0.3.0")]
    #[case("9.0.0", "9.0.0.0")]
    fn the_service_content_of_every_version_is_read(#[case] version: &str, #[case] api: &str) {
        let text = format!(
            concat!(
                "<RetrieveServiceContentResponse><returnval>",
                r#"<rootFolder type="Folder">group-d1</rootFolder>"#,
                r#"<propertyCollector type="PropertyCollector">propertyCollector</propertyCollector>"#,
                r#"<viewManager type="ViewManager">ViewManager</viewManager>"#,
                "<about><name>VMware vCenter Server</name><fullName>VMware vCenter Server {0} build-1</fullName>",
                "<vendor>VMware, Inc.</vendor><version>{0}</version><build>1</build><osType>linux-x64</osType>",
                "<productLineId>vpx</productLineId><apiType>VirtualCenter</apiType><apiVersion>{1}</apiVersion>",
                "<instanceUuid>4a6b</instanceUuid></about>",
                r#"<setting type="OptionManager">VpxSettings</setting>"#,
                r#"<sessionManager type="SessionManager">SessionManager</sessionManager>"#,
                r#"<searchIndex type="SearchIndex">SearchIndex</searchIndex>"#,
                r#"<somethingNew type="SomethingNew">of-a-later-version</somethingNew>"#,
                "</returnval></RetrieveServiceContentResponse>",
            ),
            version, api
        );
        let content = Content::read(&Element::parse(&text).unwrap()).unwrap();
        let about = &content.about;
        assert_eq!((about.version.as_str(), about.api_version.as_str()), (version, api));
        assert_eq!(
            (about.api_type.as_str(), about.instance_uuid.as_str()),
            ("VirtualCenter", "4a6b")
        );
        assert_eq!(content.session_manager.value(), "SessionManager");
        assert!(content.search_index.is_some() && content.view_manager.is_some());
    }
}
