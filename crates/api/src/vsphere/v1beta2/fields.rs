//! The fields that differ between v1beta1 and v1beta2.

use super::super::{
    VSphereCluster, VSphereClusterIdentity, VSphereClusterTemplate, VSphereDeploymentZone, VSphereFailureDomain,
    VSphereMachine, VSphereMachineTemplate, VSphereVM,
};

/// The form of a field in v1beta2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The same value in another place.
    Same,
    /// A duration in v1beta1, whole seconds in v1beta2.
    Seconds,
    /// A map by name in v1beta1, a list of objects with a name in v1beta2.
    List,
    /// The field does not exist in v1beta2.
    Dropped,
}

/// A field that differs. Paths are relative to [`Kind::spec`] or to the status, with dots.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub v1beta1: &'static str,
    /// Empty for a field that does not exist in v1beta2.
    pub v1beta2: &'static str,
    pub form: Form,
}

/// The differences of a kind.
pub struct Kind {
    pub kind: &'static str,
    /// The object that the paths of `fields` start from.
    pub spec: &'static [&'static str],
    pub fields: &'static [Field],
    pub status: &'static [Field],
}

const fn same(v1beta1: &'static str, v1beta2: &'static str) -> Field {
    let form = Form::Same;
    Field { v1beta1, v1beta2, form }
}

const fn dropped(v1beta1: &'static str) -> Field {
    let (v1beta2, form) = ("", Form::Dropped);
    Field { v1beta1, v1beta2, form }
}

const TIMEOUT: Field = Field {
    v1beta1: "guestSoftPowerOffTimeout",
    v1beta2: "guestSoftPowerOffTimeoutSeconds",
    form: Form::Seconds,
};
const API_SERVER_CIDR: Field = dropped("network.preferredAPIServerCidr");
const CONDITIONS: Field = same("conditions", "deprecated.v1beta1.conditions");
const NEW_CONDITIONS: Field = same("v1beta2.conditions", "conditions");
const FAILURE_REASON: Field = same("failureReason", "deprecated.v1beta1.failureReason");
const FAILURE_MESSAGE: Field = same("failureMessage", "deprecated.v1beta1.failureMessage");
const PROVISIONED: Field = same("ready", "initialization.provisioned");

const MACHINE: &[Field] = &[
    TIMEOUT,
    API_SERVER_CIDR,
    same("namingStrategy", "naming"),
    dropped("failureDomain"),
];
const VM: &[Field] = &[
    TIMEOUT,
    API_SERVER_CIDR,
    dropped("bootstrapRef.apiVersion"),
    dropped("bootstrapRef.fieldPath"),
    dropped("bootstrapRef.kind"),
    dropped("bootstrapRef.namespace"),
    dropped("bootstrapRef.resourceVersion"),
    dropped("bootstrapRef.uid"),
];

pub const KINDS: [Kind; 8] = [
    Kind {
        kind: VSphereMachine::KIND,
        spec: &["spec"],
        fields: MACHINE,
        status: &[CONDITIONS, NEW_CONDITIONS, FAILURE_REASON, FAILURE_MESSAGE, PROVISIONED],
    },
    Kind {
        kind: VSphereMachineTemplate::KIND,
        spec: &["spec", "template", "spec"],
        fields: MACHINE,
        status: &[],
    },
    Kind {
        kind: VSphereVM::KIND,
        spec: &["spec"],
        fields: VM,
        status: &[CONDITIONS, NEW_CONDITIONS, FAILURE_REASON, FAILURE_MESSAGE],
    },
    Kind {
        kind: VSphereCluster::KIND,
        spec: &["spec"],
        fields: &[],
        status: &[
            CONDITIONS,
            NEW_CONDITIONS,
            PROVISIONED,
            Field {
                v1beta1: "failureDomains",
                v1beta2: "failureDomains",
                form: Form::List,
            },
        ],
    },
    Kind {
        kind: VSphereClusterTemplate::KIND,
        spec: &["spec", "template", "spec"],
        fields: &[],
        status: &[],
    },
    Kind {
        kind: VSphereClusterIdentity::KIND,
        spec: &["spec"],
        fields: &[],
        status: &[CONDITIONS, NEW_CONDITIONS],
    },
    Kind {
        kind: VSphereDeploymentZone::KIND,
        spec: &["spec"],
        fields: &[],
        status: &[CONDITIONS, NEW_CONDITIONS],
    },
    Kind {
        kind: VSphereFailureDomain::KIND,
        spec: &["spec"],
        fields: &[dropped("region.autoConfigure"), dropped("zone.autoConfigure")],
        status: &[],
    },
];

pub fn of(kind: &str) -> Option<&'static Kind> {
    const ALL: &[Kind] = &KINDS;
    ALL.iter().find(|known| known.kind == kind)
}
