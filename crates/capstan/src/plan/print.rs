//! The plan as a table and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::Result;
use capstan_kube::runtime::{Planned, Preview};
use kube::ResourceExt;
use serde::Serialize;

use super::changes::{Change, Outcome};

/// Everything that a plan found.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Whether something would change.
    changes: bool,
    /// Whether all objects were observed.
    complete: bool,
    objects: Vec<Line>,
    /// The objects of the files of -f.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<FileLine>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    /// The writes that were refused while objects were observed and steps were tried, with their numbers.
    refused_writes: BTreeMap<String, usize>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    #[serde(flatten)]
    planned: Planned,
    changes: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocked_by: Option<String>,
    total_cloud_calls: usize,
}

#[derive(Serialize)]
struct FileLine {
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    name: String,
    outcome: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

impl Report {
    pub fn new(preview: &Preview, changes: Vec<Change>, notes: Vec<String>, complete: bool) -> Self {
        let planned = preview.planned();
        let complete = complete && planned.iter().all(|planned| planned.error.is_none());
        let is_planned = |change: &Change| {
            let namespace = change.object.namespace();
            let same = |planned: &Planned| {
                let planned_namespace = Some(&planned.namespace).filter(|namespace| !namespace.is_empty());
                (planned.kind.as_str(), planned_namespace) == (change.kind(), namespace.as_ref())
                    && planned.name == change.object.name_any()
            };
            planned.iter().any(same)
        };
        let files = changes.iter().map(|change| FileLine {
            kind: change.kind().to_owned(),
            namespace: change.object.namespace(),
            name: change.object.name_any(),
            outcome: change.outcome,
            note: note((!is_planned(change)).then(|| change.note()), change.caveat()),
        });
        let files: Vec<FileLine> = files.collect();
        let objects = planned.into_iter().map(|planned| Line {
            changes: planned.changes(),
            blocked_by: planned.blocked(),
            total_cloud_calls: planned.cloud_calls(),
            planned,
        });
        let objects: Vec<Line> = objects.collect();
        let applied = files.iter().any(|file| file.outcome != Outcome::Unchanged);
        Self {
            changes: applied || objects.iter().any(|line| line.changes),
            complete,
            objects,
            files,
            notes,
            refused_writes: preview.refused(),
        }
    }

    pub fn changes(&self) -> bool {
        self.changes
    }

    pub fn is_complete(&self) -> bool {
        self.complete
    }

    pub fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    pub fn table(&self) -> String {
        let mut text = String::new();
        for file in &self.files {
            let outcome = match file.outcome {
                Outcome::Created => "would be created",
                Outcome::Changed => "would be changed",
                Outcome::Unchanged => "would stay as it is",
            };
            let note = file.note.as_ref().map(|note| format!(": {note}")).unwrap_or_default();
            let _ = writeln!(
                text,
                "{} {} {outcome}{note}",
                file.kind,
                place(file.namespace.as_deref(), &file.name)
            );
        }
        let (busy, idle): (Vec<&Line>, Vec<&Line>) = self
            .objects
            .iter()
            .partition(|line| line.changes || line.blocked_by.is_some());
        for line in &busy {
            line.print(&mut text);
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        let errors = self.objects.iter().filter(|line| line.planned.error.is_some()).count();
        let changing = self.objects.iter().filter(|line| line.changes).count();
        let calls: usize = self.objects.iter().map(|line| line.total_cloud_calls).sum();
        let _ = writeln!(
            text,
            "{} objects: {changing} would change, {} would stay as they are, {errors} cannot be planned; at least {calls} \
             writes to the cloud. Nothing was written.",
            self.objects.len(),
            idle.len(),
        );
        text
    }
}

impl Line {
    fn print(&self, text: &mut String) {
        let planned = &self.planned;
        let namespace = Some(planned.namespace.as_str()).filter(|namespace| !namespace.is_empty());
        let _ = writeln!(text, "{} {}", planned.kind, place(namespace, &planned.name));
        for (number, step) in (1..).zip(planned.steps.iter().filter(|step| step.changes)) {
            let _ = writeln!(text, "  {number}. {}", step.step);
        }
        for (number, wave) in (1..).zip(&planned.forecast.waves) {
            let _ = writeln!(text, "  wave {number}: {wave}");
        }
        if !planned.forecast.waves.is_empty() && !planned.forecast.stay.is_empty() {
            let _ = writeln!(text, "  stay: {}", planned.forecast.stay.join(", "));
        }
        if let Some(blocked) = &self.blocked_by {
            let _ = writeln!(text, "  in the way: {blocked}");
        }
        if self.total_cloud_calls > 0 {
            let _ = writeln!(text, "  writes to the cloud: at least {}", self.total_cloud_calls);
        }
    }
}

fn note(about_kind: Option<&str>, caveat: Option<&str>) -> Option<String> {
    let notes: Vec<&str> = about_kind.into_iter().chain(caveat).collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

fn place(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}
