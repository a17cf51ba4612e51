//! Managed disks.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put};
use crate::model::Disk;
use crate::{Error, Operation};
use capstan_core::azure_names::AzureName;
use http::Method;

const DISKS: &str = "2024-03-02";

impl Client {
    pub(crate) fn disk(&self, method: Method, group: &str, name: &str, policy: Policy) -> Result<Call, Error> {
        let path = self.compute(group)?.resource("disks", AzureName::Disk, name)?;
        Ok(Call::new(method, path, DISKS, policy))
    }

    pub async fn get_disk(&self, group: &str, name: &str) -> Result<Option<Disk>, Error> {
        self.get(self.disk(Method::GET, group, name, Policy::DiskRead)?).await
    }

    pub(crate) fn disks(&self, group: &str) -> Result<Call, Error> {
        let path = self.compute(group)?.word("disks");
        Ok(Call::new(Method::GET, path, DISKS, Policy::DiskRead))
    }

    pub async fn list_disks(&self, group: &str) -> Result<Vec<Disk>, Error> {
        self.list(self.disks(group)?).await
    }

    /// Creates or updates a disk. Azure may answer without a body while it works.
    pub async fn put_disk(&self, group: &str, name: &str, disk: &Disk) -> Result<Put<Disk>, Error> {
        let call = self.disk(Method::PUT, group, name, Policy::DiskWrite)?;
        self.change(call.body(disk)?).await
    }

    /// Deletes a disk by its name; one that is not there counts as deleted (`None`).
    ///
    /// The only delete without a proof of ownership: OpenShift's own Azure role may delete disks but not read them. The
    /// caller answers for the name: it must derive from a machine whose virtual machine was proven owned, or from that
    /// virtual machine's own description.
    pub async fn delete_disk(&self, group: &str, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.disk(Method::DELETE, group, name, Policy::DiskWrite)?)
            .await
    }
}
