//! The real parts, and their sources.
//!
//! A part is a Go program (or some files) of a module whose `go.mod` and `go.sum` pin all its inputs. To add one: put
//! its module under `tools/`, name its files in a [`Module`] here, and declare a [`Part`].

use std::path::PathBuf;

use anyhow::Result;

use crate::gobuild;

/// A Go module of `tools/`, embedded so that a `capstan` binary can build its parts from anywhere.
pub struct Module {
    pub name: &'static str,
    /// Path inside the module, and content.
    pub files: &'static [(&'static str, &'static str)],
}

/// The source of a part.
pub enum Source {
    /// A main package.
    Program {
        package: &'static str,
        /// Linker flags beyond `-s -w`.
        ldflags: &'static str,
        /// The command that prints the version of an installed program, and the beginning of the output when it fits.
        /// `None`: an installed program of this name is never used.
        version: Option<Version>,
    },
    /// Files of a module that the module requires: the required module, and paths inside it. A path that ends with `/`
    /// selects all YAML files in that folder.
    Files {
        of: &'static str,
        paths: &'static [&'static str],
    },
}

pub struct Version {
    pub args: &'static [&'static str],
    /// The text that its output must contain.
    pub fits: &'static str,
}

pub struct Part {
    pub name: &'static str,
    pub module: &'static Module,
    pub source: Source,
}

impl Part {
    /// The program, or the folder of files: from the cache, from `KUBEBUILDER_ASSETS` or `PATH` when the version fits,
    /// or built now. Blocks while it builds.
    pub fn path(&self) -> Result<PathBuf> {
        gobuild::provide(self)
    }
}

macro_rules! module {
    ($name:literal: $($file:literal),+ $(,)?) => {
        Module {
            name: $name,
            files: &[$(($file, include_str!(concat!("../../../tools/", $name, "/", $file)))),+],
        }
    };
}

static CONTROLPLANE: Module = module!("controlplane": "go.mod", "go.sum", "etcd/main.go");

/// Without these the programs report `v0.0.0-master`, which kubectl and Cluster API refuse.
const KUBE_LDFLAGS: &str = "-X k8s.io/component-base/version.gitVersion=v1.36.3 \
     -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36 \
     -X k8s.io/client-go/pkg/version.gitVersion=v1.36.3";

const fn kubernetes(name: &'static str, package: &'static str, args: &'static [&'static str]) -> Part {
    let version = Some(Version { args, fits: "v1.36." });
    Part {
        name,
        module: &CONTROLPLANE,
        source: Source::Program {
            package,
            ldflags: KUBE_LDFLAGS,
            version,
        },
    }
}

/// A program of which one that is found elsewhere is never used.
const fn always_built(
    name: &'static str,
    module: &'static Module,
    package: &'static str,
    ldflags: &'static str,
) -> Part {
    Part {
        name,
        module,
        source: Source::Program {
            package,
            ldflags,
            version: None,
        },
    }
}

pub static KUBE_APISERVER: Part = kubernetes("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", &["--version"]);
pub static KUBE_CONTROLLER_MANAGER: Part = kubernetes(
    "kube-controller-manager",
    "k8s.io/kubernetes/cmd/kube-controller-manager",
    &["--version"],
);
pub static KUBECTL: Part = kubernetes("kubectl", "k8s.io/kubernetes/cmd/kubectl", &["version", "--client"]);

pub static ETCD: Part = Part {
    name: "etcd",
    module: &CONTROLPLANE,
    source: Source::Program {
        package: "./etcd",
        ldflags: "",
        version: Some(Version {
            args: &["--version"],
            fits: "etcd Version: 3.6.",
        }),
    },
};

pub static KWOK: Part = Part {
    name: "kwok",
    module: &CONTROLPLANE,
    source: Source::Program {
        package: "sigs.k8s.io/kwok/cmd/kwok",
        ldflags: "",
        version: Some(Version {
            args: &["--version"],
            fits: "v0.8.",
        }),
    },
};

/// The stages of Nodes and Pods for kwok; the program alone does nothing.
pub static KWOK_STAGES: Part = Part {
    name: "kwok-stages",
    module: &CONTROLPLANE,
    source: Source::Files {
        of: "sigs.k8s.io/kwok",
        paths: &[
            "kustomize/stage/node/fast/node-initialize.yaml",
            "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
            "kustomize/stage/pod/fast/pod-ready.yaml",
            "kustomize/stage/pod/fast/pod-complete.yaml",
            "kustomize/stage/pod/fast/pod-delete.yaml",
        ],
    },
};

static VCSIM_MODULE: Module = module!("vcsim":
    "go.mod", "go.sum", "main.go", "admin.go", "conditions.go", "find.go", "front.go", "groups.go", "inventory.go", "library.go", "limits.go",
    "order.go", "policies.go", "state.go", "templates.go", "world.go");

/// A simulated vCenter: our own main on govmomi's simulator.
pub static VCSIM: Part = always_built("vcsim", &VCSIM_MODULE, ".", "");

static FAKEARM_MODULE: Module = module!("fakearm": "go.mod", "go.sum", "main.go", "routes.go", "servers.go");

/// Azure's own typed fakes of Resource Manager, that refuse what its specification does not have.
pub static FAKEARM: Part = always_built("fakearm", &FAKEARM_MODULE, ".", "");

static PROMTOOL_MODULE: Module = module!("promtool": "go.mod", "go.sum");

/// Prometheus's own test of alerting rules.
pub static PROMTOOL: Part = always_built(
    "promtool",
    &PROMTOOL_MODULE,
    "github.com/prometheus/prometheus/cmd/promtool",
    "",
);

static HELM_MODULE: Module = module!("helm": "go.mod", "go.sum");

/// Renders and checks the charts.
pub static HELM: Part = Part {
    name: "helm",
    module: &HELM_MODULE,
    source: Source::Program {
        package: "helm.sh/helm/v4/cmd/helm",
        ldflags: "",
        version: Some(Version {
            args: &["version", "--short"],
            fits: "v4.",
        }),
    },
};

static UMOCI_MODULE: Module = module!("umoci": "go.mod", "go.sum");

/// Writes and unpacks OCI images.
pub static UMOCI: Part = Part {
    name: "umoci",
    module: &UMOCI_MODULE,
    source: Source::Program {
        package: "github.com/opencontainers/umoci/cmd/umoci",
        ldflags: "",
        version: Some(Version {
            args: &["--version"],
            fits: "umoci version 0.",
        }),
    },
};

static IGNITION: Module = module!("ignition": "go.mod", "go.sum");

/// Ignition's own check of a config.
pub static IGNITION_VALIDATE: Part = always_built(
    "ignition-validate",
    &IGNITION,
    "github.com/coreos/ignition/v2/validate",
    "",
);

static CAPI: Module = module!("capi": "go.mod", "go.sum");

/// The Cluster API core manager.
pub static CLUSTER_API: Part = always_built(
    "cluster-api",
    &CAPI,
    "sigs.k8s.io/cluster-api/core",
    "-X sigs.k8s.io/cluster-api/version.gitVersion=v1.14.2 \
     -X sigs.k8s.io/cluster-api/version.gitMajor=1 -X sigs.k8s.io/cluster-api/version.gitMinor=14",
);

static CLUSTERCTL_MODULE: Module = module!("clusterctl": "go.mod", "go.sum");

/// Installs, upgrades and moves what Cluster API manages.
pub static CLUSTERCTL: Part = always_built(
    "clusterctl",
    &CLUSTERCTL_MODULE,
    "sigs.k8s.io/cluster-api/cmd/clusterctl",
    "-X sigs.k8s.io/cluster-api/version.gitVersion=v1.14.2 \
     -X sigs.k8s.io/cluster-api/version.gitMajor=1 -X sigs.k8s.io/cluster-api/version.gitMinor=14",
);

/// The kinds of kubeadm's providers.
pub static KUBEADM_CRDS: Part = Part {
    name: "kubeadm-crds",
    module: &CLUSTERCTL_MODULE,
    source: Source::Files {
        of: "sigs.k8s.io/cluster-api",
        paths: &[
            "bootstrap/kubeadm/config/crd/bases/",
            "controlplane/kubeadm/config/crd/bases/",
        ],
    },
};

/// The kinds of `cluster.x-k8s.io` and its neighbours.
pub static CLUSTER_API_CRDS: Part = Part {
    name: "cluster-api-crds",
    module: &CAPI,
    source: Source::Files {
        of: "sigs.k8s.io/cluster-api",
        paths: &["core/config/crd/bases/"],
    },
};

static CAPI_DEFINITIONS: Module = module!("capi-definitions": "go.mod", "go.sum");

const fn earlier_crds(name: &'static str, of: &'static str) -> Part {
    files(name, &CAPI_DEFINITIONS, of, &["config/crd/bases/"])
}

/// The kinds of `cluster.x-k8s.io` in earlier versions.
pub static CLUSTER_API_1_10_CRDS: Part = earlier_crds("cluster-api-1.10-crds", "capstan.dev/cluster-api-1.10");
pub static CLUSTER_API_1_11_CRDS: Part = earlier_crds("cluster-api-1.11-crds", "capstan.dev/cluster-api-1.11");
pub static CLUSTER_API_1_12_CRDS: Part = earlier_crds("cluster-api-1.12-crds", "capstan.dev/cluster-api-1.12");
pub static CLUSTER_API_1_13_CRDS: Part = earlier_crds("cluster-api-1.13-crds", "capstan.dev/cluster-api-1.13");

/// The webhooks of the core manager.
pub static CLUSTER_API_WEBHOOKS: Part = Part {
    name: "cluster-api-webhooks",
    module: &CAPI,
    source: Source::Files {
        of: "sigs.k8s.io/cluster-api",
        paths: &["core/config/webhook/manifests.yaml"],
    },
};

static CAPV_MODULE: Module = module!("capv": "go.mod", "go.sum");
static CAPV_1_14_MODULE: Module = module!("capv-1.14": "go.mod", "go.sum");
static CAPZ_MODULE: Module = module!("capz": "go.mod", "go.sum");
const CAPV_SOURCE: &str = "sigs.k8s.io/cluster-api-provider-vsphere";
const CAPZ_SOURCE: &str = "sigs.k8s.io/cluster-api-provider-azure";

const fn files(name: &'static str, module: &'static Module, of: &'static str, paths: &'static [&'static str]) -> Part {
    Part {
        name,
        module,
        source: Source::Files { of, paths },
    }
}

const fn capv_crds(name: &'static str, module: &'static Module) -> Part {
    files(name, module, CAPV_SOURCE, &["config/default/crd/bases/"])
}

const fn capv_webhooks(name: &'static str, module: &'static Module) -> Part {
    files(name, module, CAPV_SOURCE, &["config/govmomi/webhook/manifests.yaml"])
}

const fn capv_templates(name: &'static str, module: &'static Module) -> Part {
    files(name, module, CAPV_SOURCE, &["templates/"])
}

/// Cluster API's vSphere provider, whose definitions store v1beta2. Only tests of take-overs need it.
pub static CAPV: Part = always_built("capv", &CAPV_MODULE, CAPV_SOURCE, "");
pub static CAPV_CRDS: Part = capv_crds("capv-crds", &CAPV_MODULE);
pub static CAPV_WEBHOOKS: Part = capv_webhooks("capv-webhooks", &CAPV_MODULE);

/// The cluster templates that it publishes.
pub static CAPV_TEMPLATES: Part = capv_templates("capv-templates", &CAPV_MODULE);

/// The provider's last line of versions that store v1beta1.
pub static CAPV_1_14: Part = always_built("capv-1.14", &CAPV_1_14_MODULE, CAPV_SOURCE, "");
pub static CAPV_1_14_CRDS: Part = capv_crds("capv-1.14-crds", &CAPV_1_14_MODULE);
pub static CAPV_1_14_WEBHOOKS: Part = capv_webhooks("capv-1.14-webhooks", &CAPV_1_14_MODULE);

pub static CAPV_1_14_TEMPLATES: Part = capv_templates("capv-1.14-templates", &CAPV_1_14_MODULE);

/// Cluster API's Azure provider. Only tests of take-overs need it.
pub static CAPZ: Part = always_built("capz", &CAPZ_MODULE, CAPZ_SOURCE, "");
pub static CAPZ_CRDS: Part = files("capz-crds", &CAPZ_MODULE, CAPZ_SOURCE, &["config/crd/bases/"]);
pub static CAPZ_WEBHOOKS: Part = files(
    "capz-webhooks",
    &CAPZ_MODULE,
    CAPZ_SOURCE,
    &["config/webhook/manifests.yaml"],
);
/// Clusters as its own users and its own tests make them.
pub static CAPZ_TEMPLATES: Part = files(
    "capz-templates",
    &CAPZ_MODULE,
    CAPZ_SOURCE,
    &["templates/", "templates/test/ci/", "templates/test/dev/"],
);
