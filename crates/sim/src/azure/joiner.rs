//! Nodes of running instances join a cluster.

use std::path::PathBuf;

/// Where Nodes join.
#[derive(Clone, Debug)]
pub struct Options {
    pub kubeconfig: PathBuf,
}
