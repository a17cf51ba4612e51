//! Events on objects. Invariant: a repeated event about an object becomes a count on one Event, which is written only
//! when the count doubles or [`REFRESH`] has passed; recording never fails its caller.
//!
//! The recorder writes core/v1 Events with count, first and last time and source: the replaced controllers wrote these,
//! and the field selectors and alerts of their users match them. The API server serves the same objects under
//! events.k8s.io. kube's recorder would drop every message after the first of a reason.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_core::clock::Clock;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use parking_lot::Mutex;
use serde::Serialize;

/// A repeated Event is written at least this often, so that `kubectl get events` shows it as recent.
const REFRESH: Duration = Duration::from_secs(300);
/// Events older than this start with a new count: the API server keeps them for an hour.
const FORGET: Duration = Duration::from_secs(3000);
/// The API server takes messages of up to 1024 bytes.
const LONGEST_MESSAGE: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    Normal,
    Warning,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct EventKey {
    uid: Option<String>,
    component: String,
    level: Level,
    reason: String,
    message: String,
}

#[derive(Clone, Debug)]
struct Record {
    name: String,
    count: i32,
    written: i32,
    written_at: Timestamp,
}

/// Writes the event to the log too: the API server removes events after an hour.
fn log<K: Resource<DynamicType = ()>>(object: &K, key: &EventKey) {
    let (kind, name) = (K::kind(&()), object.name_any());
    let namespace = object.namespace();
    match key.level {
        Level::Normal => tracing::info!(%kind, namespace, name, reason = key.reason, "{}", key.message),
        Level::Warning => tracing::warn!(%kind, namespace, name, reason = key.reason, "{}", key.message),
    }
}

/// The write that one more event causes.
#[derive(Debug, PartialEq, Eq)]
enum Write {
    Create(String),
    Count { name: String, count: i32 },
    Nothing,
}

/// Writes events in the name of one component. Clones share the counts.
#[derive(Clone)]
pub struct Recorder {
    client: kube::Client,
    component: String,
    clock: Clock,
    recorded: Arc<Mutex<HashMap<EventKey, Record>>>,
}

impl Recorder {
    pub fn new(client: kube::Client, component: impl Into<String>, clock: Clock) -> Self {
        Self {
            client,
            component: component.into(),
            clock,
            recorded: Arc::default(),
        }
    }

    /// Returns the same recorder under another component's name (`source.component` and `reportingComponent`).
    pub fn named(&self, component: impl Into<String>) -> Self {
        Self {
            component: component.into(),
            ..self.clone()
        }
    }

    pub async fn normal<K: Resource<DynamicType = ()>>(&self, object: &K, reason: &str, message: impl Into<String>) {
        self.record(Level::Normal, object, reason, message.into()).await;
    }

    pub async fn warning<K: Resource<DynamicType = ()>>(&self, object: &K, reason: &str, message: impl Into<String>) {
        self.record(Level::Warning, object, reason, message.into()).await;
    }

    pub async fn record<K: Resource<DynamicType = ()>>(&self, level: Level, object: &K, reason: &str, message: String) {
        let (message, now) = (shorten(&message, LONGEST_MESSAGE), self.clock.now());
        let key = EventKey {
            uid: object.uid(),
            component: self.component.clone(),
            level,
            reason: reason.to_owned(),
            message,
        };
        let write = {
            let mut map = self.recorded.lock();
            decide(&mut map, &key, &object.name_any(), now)
        };
        if write == Write::Nothing {
            return;
        }
        log(object, &key);
        let namespace = object.namespace().unwrap_or_else(|| "default".to_owned());
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let done = match write {
            Write::Nothing => return,
            Write::Create(name) => self.create(&api, object, name, &key, now, 1).await,
            Write::Count { name, count } => match count_up(&api, &name, count, now).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    self.create(&api, object, name, &key, now, count).await
                }
                done => done,
            },
        };
        if let Err(error) = done {
            tracing::warn!(object = %object.name_any(), reason, %error, "the API server did not accept the event");
        }
    }

    async fn create<K: Resource<DynamicType = ()>>(
        &self,
        api: &Api<Event>,
        object: &K,
        name: String,
        key: &EventKey,
        now: Timestamp,
        count: i32,
    ) -> Result<(), kube::Error> {
        let regarding: ObjectReference = object.object_ref(&());
        let namespace = regarding.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let event = Event {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(namespace),
                ..ObjectMeta::default()
            },
            involved_object: regarding,
            reason: Some(key.reason.clone()),
            message: Some(key.message.clone()),
            type_: Some(format!("{:?}", key.level)),
            source: Some(EventSource {
                component: Some(self.component.clone()),
                host: None,
            }),
            reporting_component: Some(self.component.clone()),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            count: Some(count),
            ..Event::default()
        };
        api.create(&PostParams::default(), &event).await.map(drop)
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CountPatch {
    count: i32,
    last_timestamp: Time,
}

async fn count_up(api: &Api<Event>, name: &str, count: i32, now: Timestamp) -> Result<(), kube::Error> {
    let patch = Patch::Merge(CountPatch {
        count,
        last_timestamp: Time(now),
    });
    api.patch(name, &PatchParams::default(), &patch).await.map(drop)
}

fn decide(recorded: &mut HashMap<EventKey, Record>, key: &EventKey, object: &str, now: Timestamp) -> Write {
    recorded.retain(|_, record| age(record, now) < FORGET);
    match recorded.get_mut(key) {
        None => {
            let name = format!("{object}.{:x}", now.as_nanosecond());
            let record = Record {
                name: name.clone(),
                count: 1,
                written: 1,
                written_at: now,
            };
            recorded.insert(key.clone(), record);
            Write::Create(name)
        }
        Some(record) => {
            record.count = record.count.saturating_add(1);
            if record.count < record.written.saturating_mul(2) && age(record, now) < REFRESH {
                return Write::Nothing;
            }
            record.written = record.count;
            record.written_at = now;
            Write::Count {
                name: record.name.clone(),
                count: record.count,
            }
        }
    }
}

fn age(record: &Record, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(record.written_at)).unwrap_or_default()
}

/// Returns a message of at most so many bytes.
pub(crate) fn shorten(message: &str, most: usize) -> String {
    if message.len() <= most {
        return message.to_owned();
    }
    let cut = &message[..message.floor_char_boundary(most - 3)];
    format!("{cut}...")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event_key(message: &str) -> EventKey {
        let (uid, component, reason) = (Some("u".to_owned()), "c".to_owned(), "r".to_owned());
        EventKey {
            uid,
            component,
            level: Level::Warning,
            reason,
            message: message.to_owned(),
        }
    }

    #[test]
    fn a_repeated_event_is_written_when_its_count_doubles() {
        let (mut map, now) = (HashMap::new(), Timestamp::UNIX_EPOCH);
        let writes: Vec<i32> = (1..=9)
            .filter_map(|_| match decide(&mut map, &event_key("a"), "m", now) {
                Write::Create(_) => Some(1),
                Write::Count { count, .. } => Some(count),
                Write::Nothing => None,
            })
            .collect();
        assert_eq!(writes, [1, 2, 4, 8]);
    }

    #[test]
    fn another_message_is_another_event() {
        let (mut map, now) = (HashMap::new(), Timestamp::UNIX_EPOCH);
        assert!(matches!(decide(&mut map, &event_key("a"), "m", now), Write::Create(_)));
        assert!(matches!(decide(&mut map, &event_key("b"), "m", now), Write::Create(_)));
    }

    #[test]
    fn a_repeated_event_is_refreshed_and_in_the_end_forgotten() {
        let (mut map, now) = (HashMap::new(), Timestamp::UNIX_EPOCH);
        decide(&mut map, &event_key("a"), "m", now);
        decide(&mut map, &event_key("a"), "m", now);
        assert_eq!(decide(&mut map, &event_key("a"), "m", now), Write::Nothing);
        assert!(matches!(
            decide(&mut map, &event_key("a"), "m", now + REFRESH),
            Write::Count { count: 4, .. }
        ));
        assert!(matches!(
            decide(&mut map, &event_key("a"), "m", now + REFRESH + FORGET),
            Write::Create(_)
        ));
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let text = shorten(&"ü".repeat(600), LONGEST_MESSAGE);
        assert!(text.len() <= LONGEST_MESSAGE && text.ends_with("ü..."));
    }
}
