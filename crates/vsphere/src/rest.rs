//! Tags and cluster modules, which only vCenter's REST API has.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::moref::MoRef;
use crate::vcenter::Vcenter;

const SESSION: &str = "/rest/com/vmware/cis/session";
const ASSOCIATION: &str = "/rest/com/vmware/cis/tagging/tag-association";
const TAG: &str = "/rest/com/vmware/cis/tagging/tag";
const CATEGORY: &str = "/rest/com/vmware/cis/tagging/category";
const MODULES: &str = "/rest/vcenter/cluster/modules";
const MEMBERS: &str = "/rest/vcenter/cluster/modules/vm";
/// A REST call that has not been answered by then is taken for lost.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(60);

#[derive(Deserialize)]
struct Value<T> {
    value: T,
}

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

#[derive(Serialize)]
struct ModuleSpec<'a> {
    spec: ModuleCluster<'a>,
}

#[derive(Serialize)]
struct ModuleCluster<'a> {
    cluster: &'a str,
}

#[derive(Serialize)]
struct Members<'a> {
    vms: [&'a str; 1],
}

#[derive(Deserialize)]
struct ModuleList {
    summaries: Vec<Module>,
}

/// A cluster module: machines that are kept on different hosts.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Module {
    pub module: String,
    pub cluster: String,
}

impl Vcenter {
    /// Attaches tags (by id) to a machine; those that it has already are no error.
    pub async fn attach_tags(&self, vm: &MoRef, tags: &[String]) -> Result<()> {
        if tags.is_empty() {
            return Ok(());
        }
        let body = Several {
            object_id: object_id(vm),
            tag_ids: tags,
        };
        let path = format!("{ASSOCIATION}?~action=attach-multiple-tags-to-object");
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

    /// The ids of the tags that a machine has.
    pub async fn attached_tags(&self, vm: &MoRef) -> Result<Vec<String>> {
        let body = OfObject {
            object_id: object_id(vm),
        };
        let path = format!("{ASSOCIATION}?~action=list-attached-tags");
        Ok(self.rest::<Value<_>>("POST", &path, Some(&body), false).await?.value)
    }

    pub async fn tag(&self, id: &str) -> Result<Tag> {
        Ok(self
            .rest::<Value<_>>("GET", &format!("{TAG}/id:{id}"), NOTHING, false)
            .await?
            .value)
    }

    pub async fn create_tag_category(&self, name: &str) -> Result<String> {
        #[derive(Serialize)]
        struct Body<'a> {
            create_spec: Spec<'a>,
        }
        #[derive(Serialize)]
        struct Spec<'a> {
            name: &'a str,
            description: &'a str,
            cardinality: &'a str,
            associable_types: [&'a str; 0],
        }
        let create_spec = Spec {
            name,
            description: "",
            cardinality: "MULTIPLE",
            associable_types: [],
        };
        Ok(self
            .rest::<Value<_>>("POST", CATEGORY, Some(&Body { create_spec }), true)
            .await?
            .value)
    }

    pub async fn create_tag(&self, category_id: &str, name: &str) -> Result<String> {
        #[derive(Serialize)]
        struct Body<'a> {
            create_spec: Spec<'a>,
        }
        #[derive(Serialize)]
        struct Spec<'a> {
            name: &'a str,
            description: &'a str,
            category_id: &'a str,
        }
        let create_spec = Spec {
            name,
            description: "",
            category_id,
        };
        Ok(self
            .rest::<Value<_>>("POST", TAG, Some(&Body { create_spec }), true)
            .await?
            .value)
    }

    pub async fn create_cluster_module(&self, cluster: &MoRef) -> Result<String> {
        let body = ModuleSpec {
            spec: ModuleCluster {
                cluster: cluster.value(),
            },
        };
        Ok(self.rest::<Value<_>>("POST", MODULES, Some(&body), true).await?.value)
    }

    pub async fn cluster_modules(&self) -> Result<Vec<Module>> {
        Ok(self
            .rest::<Value<ModuleList>>("GET", MODULES, NOTHING, false)
            .await?
            .value
            .summaries)
    }

    pub async fn delete_cluster_module(&self, module: &str) -> Result<()> {
        self.rest::<serde_json::Value>("DELETE", &format!("{MODULES}/{module}"), NOTHING, true)
            .await
            .map(|_| ())
    }

    /// Makes a machine a member of a module; a member already is no error.
    pub async fn add_to_cluster_module(&self, module: &str, vm: &MoRef) -> Result<()> {
        let path = format!("{MEMBERS}/{module}/members?action=add");
        self.rest::<serde_json::Value>("POST", &path, Some(&Members { vms: [vm.value()] }), true)
            .await
            .map(|_| ())
    }

    pub async fn remove_from_cluster_module(&self, module: &str, vm: &MoRef) -> Result<()> {
        let path = format!("{MEMBERS}/{module}/members?action=remove");
        self.rest::<serde_json::Value>("POST", &path, Some(&Members { vms: [vm.value()] }), true)
            .await
            .map(|_| ())
    }

    /// A call within the REST session; a session that vCenter has forgotten is renewed once.
    async fn rest<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
        write: bool,
    ) -> Result<T> {
        let token = self.rest_token(None).await?;
        let call = |token: String| self.rest_call(method, path, body, write, token);
        let text = match call(token.clone()).await {
            Err(error) if error.is_not_authenticated() => call(self.rest_token(Some(token)).await?).await?,
            result => result?,
        };
        let text = if text.trim().is_empty() { "null" } else { &text };
        serde_json::from_str(text).map_err(|cause| {
            Error::Xml(format!(
                "{method} {path} answered what is not the JSON expected: {cause}"
            ))
        })
    }

    async fn rest_call(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
        write: bool,
        token: String,
    ) -> Result<String> {
        let verb = reqwest::Method::from_bytes(method.as_bytes()).unwrap_or(reqwest::Method::GET);
        let request = self
            .0
            .http
            .request(verb, format!("{}{path}", self.0.base))
            .timeout(ANSWER);
        let request = request.header("vmware-api-session-id", token);
        let request = match body {
            Some(body) => request.json(body),
            None => request,
        };
        self.through(
            method,
            path,
            write,
            self.rest_send(&format!("{method} {path}"), request),
        )
        .await
    }

    async fn rest_send(&self, method: &str, request: reqwest::RequestBuilder) -> Result<String> {
        let answer = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = answer.status();
        let text = answer.text().await.map_err(|error| self.unreachable(&error))?;
        if status.is_success() {
            return Ok(text);
        }
        Err(Error::Http {
            server: self.0.login.server.clone(),
            method: method.to_owned(),
            status: status.as_u16(),
            body: text.chars().take(300).collect(),
        })
    }

    /// The session's token; a new one if there is none, or if it still is the one that vCenter refused.
    async fn rest_token(&self, refused: Option<String>) -> Result<String> {
        let mut token = self.0.rest.lock().await;
        match &*token {
            Some(token) if Some(token) != refused.as_ref() => return Ok(token.clone()),
            _ => {}
        }
        let login = &self.0.login;
        let request = self.0.http.post(format!("{}{SESSION}", self.0.base)).timeout(ANSWER);
        let request = request.basic_auth(&login.username, Some(&login.password));
        let text = self
            .through("POST", SESSION, false, self.rest_send("POST session", request))
            .await?;
        let fresh: Value<String> = serde_json::from_str(&text)
            .map_err(|cause| Error::Xml(format!("the REST session answer is not the JSON expected: {cause}")))?;
        *token = Some(fresh.value.clone());
        Ok(fresh.value)
    }

    pub(crate) async fn rest_logout(&self, token: &str) -> Result<()> {
        let request = self.0.http.delete(format!("{}{SESSION}", self.0.base)).timeout(ANSWER);
        let request = request.header("vmware-api-session-id", token);
        self.through("DELETE", SESSION, false, self.rest_send("DELETE session", request))
            .await
            .map(|_| ())
    }
}

const NOTHING: Option<&()> = None;

fn object_id(vm: &MoRef) -> ObjectId<'_> {
    ObjectId {
        kind: vm.kind(),
        id: vm.value(),
    }
}
