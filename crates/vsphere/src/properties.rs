//! The property collector: reading properties of many objects in one call.

use std::collections::HashMap;

use crate::error::{Error, Fault, Result};
use crate::soap::Call;
use crate::vcenter::Vcenter;
use crate::xml::{Element, Writer};
use capstan_core::vm::MoRef;

/// Bytes of memory that the objects of all pages of one answer take at most: some thousand machines with what is listed of them.
const MAX_RETRIEVED: usize = 24 << 20;
/// So many objects are in one answer to a call that follows steps: below a folder there may be tens of thousands, and a large
/// answer has to wait for its turn.
const PAGE: u32 = 200;
/// More pages than the largest vCenter has.
const PAGES: usize = 1000;

/// Which properties of which type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want<'a> {
    pub kind: &'a str,
    pub paths: &'a [&'a str],
}

/// A step from objects of one type along one of their properties.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step<'a> {
    pub name: &'a str,
    pub kind: &'a str,
    pub path: &'a str,
    /// Steps to go on with, by name.
    pub next: &'a [&'a str],
}

/// An object and those of its properties that have a value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Object {
    pub reference: Option<MoRef>,
    pub values: HashMap<String, Element>,
}

impl Object {
    pub fn get(&self, path: &str) -> Option<&Element> {
        self.values.get(path)
    }

    pub fn text(&self, path: &str) -> Option<&str> {
        self.get(path)
            .map(|value| value.text.trim())
            .filter(|text| !text.is_empty())
    }

    pub fn string(&self, path: &str) -> Option<String> {
        self.text(path).map(str::to_owned)
    }

    pub fn moref(&self, path: &str) -> Option<MoRef> {
        self.get(path).and_then(Element::moref)
    }

    /// Returns about how many bytes of memory the object takes.
    pub fn weight(&self) -> usize {
        let values = self.values.iter();
        values.map(|(name, value)| name.len() + value.weight()).sum::<usize>() + size_of::<Self>()
    }

    pub fn morefs(&self, path: &str) -> Vec<MoRef> {
        self.get(path).map(Element::morefs).unwrap_or_default()
    }
}

/// A filter over the given objects themselves, or over what the steps lead to from them.
pub(crate) fn write_filter(w: &mut Writer, name: &str, wants: &[Want<'_>], objects: &[MoRef], steps: &[Step<'_>]) {
    w.nest(name, |w| {
        for want in wants {
            w.nest("propSet", |w| {
                w.text("type", want.kind).value("all", false);
                for path in want.paths {
                    w.text("pathSet", path);
                }
            });
        }
        for object in objects {
            w.nest("objectSet", |w| {
                w.moref("obj", object).value("skip", false);
                for step in steps {
                    w.nest_as("selectSet", "TraversalSpec", |w| {
                        w.text("name", step.name)
                            .text("type", step.kind)
                            .text("path", step.path)
                            .value("skip", false);
                        for next in step.next {
                            w.nest_as("selectSet", "SelectionSpec", |w| {
                                w.text("name", next);
                            });
                        }
                    });
                }
            });
        }
        // Objects that are gone are left out instead of failing the whole call.
        w.value("reportMissingObjectsInResults", true);
    });
}

impl Vcenter {
    /// Properties of the given objects, and of those that the steps lead to. Objects that are gone are left out.
    pub(crate) async fn retrieve(
        &self,
        wants: &[Want<'_>],
        objects: &[MoRef],
        steps: &[Step<'_>],
    ) -> Result<Vec<Object>> {
        let collector = self.content()?.property_collector.clone();
        let mut body = Writer::new();
        write_filter(&mut body, "specSet", wants, objects, steps);
        body.nest("options", |w| {
            if !steps.is_empty() {
                w.value("maxObjects", PAGE);
            }
        });
        let body = body.finish();
        for attempt in 0.. {
            let (generation, _) = self.session();
            let call = Call::read("RetrievePropertiesEx", &collector, body.clone());
            match self.pages(call, &collector).await {
                // Some servers answer a forgotten session with properties that "may not be read" instead of a fault.
                Err(error) if error.is_not_authenticated() && attempt == 0 => self.renew(generation).await?,
                result => return result,
            }
        }
        Ok(Vec::new())
    }

    async fn pages<'a>(&self, mut call: Call<'a>, collector: &'a MoRef) -> Result<Vec<Object>> {
        let (mut objects, mut weight) = (Vec::new(), 0);
        // While the pages are read. What is kept of the objects takes memory of its own.
        let holder = self.0.memory.giving_holder(self.0.login.tenant());
        for _ in 0..PAGES {
            let answer = tokio::select! {
                answer = self.call(call) => answer?,
                full = holder.told() => return Err(full.into()),
            };
            let Some(page) = answer.child("returnval") else {
                return Ok(objects);
            };
            for object in page.all("objects") {
                let object = read_object(object)?;
                weight += object.weight();
                objects.push(object);
            }
            // A server can send small pages without end.
            if weight > MAX_RETRIEVED {
                return Err(self.too_large("RetrievePropertiesEx", MAX_RETRIEVED));
            }
            holder.set(weight)?;
            let Some(token) = page.string_at("token") else {
                return Ok(objects);
            };
            let mut body = Writer::new();
            body.text("token", token);
            call = Call::read("ContinueRetrievePropertiesEx", collector, body.finish());
        }
        Err(Error::Incomplete {
            method: "ContinueRetrievePropertiesEx".to_owned(),
            what: "a last page",
        })
    }

    /// Properties of one object; an object that is gone is a `ManagedObjectNotFound` fault.
    pub(crate) async fn retrieve_one(&self, object: &MoRef, paths: &[&str]) -> Result<Object> {
        let wants = [Want {
            kind: object.kind(),
            paths,
        }];
        let found = self.retrieve(&wants, std::slice::from_ref(object), &[]).await?;
        found.into_iter().next().ok_or_else(|| gone(object))
    }
}

pub(crate) fn gone(object: &MoRef) -> Error {
    Error::Fault {
        method: "RetrievePropertiesEx".to_owned(),
        target: object.to_string(),
        fault: Box::new(Fault {
            kind: "ManagedObjectNotFound".to_owned(),
            message: "The object has already been deleted or has not been completely created".to_owned(),
            subject: None,
            object: Some(object.clone()),
        }),
    }
}

pub(crate) fn read_object(element: &Element) -> Result<Object> {
    for missing in element.all("missingSet") {
        let fault = missing.child("fault").map(Fault::localized);
        if let Some(fault) = fault.filter(|fault| fault.is("NotAuthenticated")) {
            let target = element.text_at("obj").unwrap_or_default().to_owned();
            return Err(Error::Fault {
                method: "RetrievePropertiesEx".to_owned(),
                target,
                fault: Box::new(fault),
            });
        }
    }
    let values = element
        .all("propSet")
        .filter_map(|property| Some((property.string_at("name")?, property.child("val")?.clone())))
        .collect();
    Ok(Object {
        reference: element.moref_at("obj"),
        values,
    })
}
