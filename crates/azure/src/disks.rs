//! Managed disks.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put};
use crate::error::optional;
use crate::model::Disk;
use crate::{Error, Operation};
use http::Method;

const DISKS: &str = "2024-03-02";

impl Client {
    fn disk(&self, method: Method, group: &str, name: &str, policy: Policy) -> Call {
        Call::new(method, self.compute(group, &format!("disks/{name}")), DISKS, policy)
    }

    pub async fn get_disk(&self, group: &str, name: &str) -> Result<Option<Disk>, Error> {
        optional(self.read(self.disk(Method::GET, group, name, Policy::DiskRead)).await)
    }

    pub async fn list_disks(&self, group: &str) -> Result<Vec<Disk>, Error> {
        self.list(Call::new(
            Method::GET,
            self.compute(group, "disks"),
            DISKS,
            Policy::DiskRead,
        ))
        .await
    }

    /// Creates or updates a disk. Azure may answer without a body while it works.
    pub async fn put_disk(&self, group: &str, name: &str, disk: &Disk) -> Result<Put<Disk>, Error> {
        self.change(self.disk(Method::PUT, group, name, Policy::DiskWrite).body(disk)?)
            .await
    }

    pub async fn patch_disk(&self, group: &str, name: &str, disk: &Disk) -> Result<Put<Disk>, Error> {
        self.change(self.disk(Method::PATCH, group, name, Policy::DiskWrite).body(disk)?)
            .await
    }

    /// Deletes a disk; one that is not there counts as deleted (`None`).
    pub async fn delete_disk(&self, group: &str, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.disk(Method::DELETE, group, name, Policy::DiskWrite))
            .await
    }
}
