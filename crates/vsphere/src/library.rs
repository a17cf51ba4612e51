//! Content libraries: finds the VM template of a library item.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rest::{NOTHING, Path, Value};
use crate::vcenter::Vcenter;
use capstan_core::vm::MoRef;

const LIBRARY: Path = Path::new("/rest/com/vmware/content/library?~action=find");
const ITEM: Path = Path::new("/rest/com/vmware/content/library/item?~action=find");
const TEMPLATE: Path = Path::new("/rest/vcenter/vm-template/library-items/");

#[derive(Serialize)]
struct Find<'a> {
    spec: FindSpec<'a>,
}

#[derive(Serialize)]
struct FindSpec<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    library_id: Option<&'a str>,
}

#[derive(Deserialize)]
struct Template {
    vm_template: Option<String>,
}

impl Vcenter {
    /// Returns the VM template of an item of a content library; `path` is `library/item`.
    pub(crate) async fn library_template(&self, path: &str) -> Result<MoRef> {
        let missing = |kind| Error::NotFound {
            kind,
            path: path.to_owned(),
        };
        let (library, item) = path.split_once('/').ok_or_else(|| missing("library item"))?;
        let library = self
            .find_in_library(&LIBRARY, "content library", path, library, None)
            .await?;
        let item = self
            .find_in_library(&ITEM, "library item", path, item, Some(&library))
            .await?;
        let address = TEMPLATE.id("library item", &item)?;
        let found = self.rest("GET", &address, NOTHING, false).await;
        let found: Value<Template> = match found {
            // An OVF template or a file.
            Err(Error::Http { status: 400 | 404, .. }) => return Err(missing("VM template of library item")),
            found => found?,
        };
        let id = found.value.vm_template.filter(|id| !id.is_empty());
        id.map(|id| MoRef::vm(&id))
            .ok_or_else(|| missing("VM template of library item"))
    }

    /// Returns the id of the only library, or of the only item of a library, with this name.
    async fn find_in_library(
        &self,
        find: &Path,
        kind: &'static str,
        path: &str,
        name: &str,
        library_id: Option<&str>,
    ) -> Result<String> {
        let body = Find {
            spec: FindSpec { name, library_id },
        };
        let mut found: Vec<String> = self.rest_list("POST", find, Some(&body)).await?;
        let path = path.to_owned();
        match (found.pop(), found.is_empty()) {
            (Some(one), true) => Ok(one),
            (None, _) => Err(Error::NotFound { kind, path }),
            (Some(last), false) => {
                found.push(last);
                Err(Error::Ambiguous { kind, path, found })
            }
        }
    }
}
