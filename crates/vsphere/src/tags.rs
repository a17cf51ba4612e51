//! Tags: what they are called, in which category, and who carries them.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rest::{NOTHING, Path, Value};
use crate::vcenter::Vcenter;
use capstan_core::vm::MoRef;

const ASSOCIATION: Path = Path::new("/rest/com/vmware/cis/tagging/tag-association");
const TAG: Path = Path::new("/rest/com/vmware/cis/tagging/tag");
const CATEGORY: Path = Path::new("/rest/com/vmware/cis/tagging/category");

#[derive(Serialize)]
struct ObjectId<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    id: &'a str,
}

#[derive(Serialize)]
struct OfObject<'a> {
    object_id: ObjectId<'a>,
}

#[derive(Serialize)]
struct Several<'a> {
    object_id: ObjectId<'a>,
    tag_ids: &'a [String],
}

#[derive(Serialize)]
struct OfCategory<'a> {
    category_id: &'a str,
}

#[derive(Deserialize)]
struct Category {
    name: String,
}

/// A tag as vCenter knows it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Tag {
    pub id: String,
    pub name: String,
    pub category_id: String,
}

#[derive(Deserialize)]
struct Batch {
    success: bool,
    #[serde(default)]
    error_messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    default_message: String,
}

impl Vcenter {
    /// Attaches tags (by id) to an object; those that it has already are no error.
    pub async fn attach_tags(&self, object: &MoRef, tags: &[String]) -> Result<()> {
        if tags.is_empty() {
            return Ok(());
        }
        let body = Several {
            object_id: object_id(object),
            tag_ids: tags,
        };
        let path = ASSOCIATION.word("?~action=attach-multiple-tags-to-object");
        let answer: Value<Batch> = self.rest("POST", &path, Some(&body), true).await?;
        if answer.value.success {
            return Ok(());
        }
        let messages: Vec<String> = answer
            .value
            .error_messages
            .into_iter()
            .map(|m| m.default_message)
            .collect();
        Err(Error::Invalid {
            field: "tagIDs",
            value: tags.join(", "),
            reason: messages.join("; "),
        })
    }

    /// The ids of the tags that an object has.
    pub async fn attached_tags(&self, object: &MoRef) -> Result<Vec<String>> {
        let body = OfObject {
            object_id: object_id(object),
        };
        let path = ASSOCIATION.word("?~action=list-attached-tags");
        self.rest_list("POST", &path, Some(&body)).await
    }

    /// The id of a category, by name.
    pub async fn tag_category(&self, name: &str) -> Result<Option<String>> {
        for id in self.rest_list::<String>("GET", &CATEGORY, NOTHING).await? {
            let path = CATEGORY.word("/id:").id("tag category", &id)?;
            let category: Value<Category> = self.rest("GET", &path, NOTHING, false).await?;
            if category.value.name == name {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// The id of a tag, by the id of its category and its name.
    pub async fn tag_in_category(&self, category_id: &str, name: &str) -> Result<Option<String>> {
        let path = TAG.word("/id:").id("tag category", category_id)?;
        let path = path.word("?~action=list-tags-for-category");
        let body = OfCategory { category_id };
        for id in self.rest_list::<String>("POST", &path, Some(&body)).await? {
            if self.tag(&id).await?.name == name {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    pub async fn tag(&self, id: &str) -> Result<Tag> {
        let path = TAG.word("/id:").id("tag", id)?;
        Ok(self.rest::<Value<_>>("GET", &path, NOTHING, false).await?.value)
    }

    pub async fn create_tag_category(&self, name: &str) -> Result<String> {
        #[derive(Serialize)]
        struct Spec<'a> {
            name: &'a str,
            description: &'a str,
            cardinality: &'a str,
            associable_types: [&'a str; 0],
        }
        let spec = Spec {
            name,
            description: "",
            cardinality: "MULTIPLE",
            associable_types: [],
        };
        self.create(&CATEGORY, spec).await
    }

    pub async fn create_tag(&self, category_id: &str, name: &str) -> Result<String> {
        #[derive(Serialize)]
        struct Spec<'a> {
            name: &'a str,
            description: &'a str,
            category_id: &'a str,
        }
        let spec = Spec {
            name,
            description: "",
            category_id,
        };
        self.create(&TAG, spec).await
    }

    async fn create<T: Serialize>(&self, path: &Path, create_spec: T) -> Result<String> {
        #[derive(Serialize)]
        struct Body<T> {
            create_spec: T,
        }
        let made: Value<_> = self.rest("POST", path, Some(&Body { create_spec }), true).await?;
        Ok(made.value)
    }
}

fn object_id(object: &MoRef) -> ObjectId<'_> {
    ObjectId {
        kind: object.kind(),
        id: object.value(),
    }
}
