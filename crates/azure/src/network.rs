//! Network interfaces, public addresses, subnets and load balancers.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put, When};
use crate::error::optional;
use crate::model::{LoadBalancer, NetworkInterface, PublicIpAddress, Subnet};
use crate::{Error, Operation};
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

const NETWORK: &str = "2024-05-01";

impl Client {
    fn network(&self, method: Method, group: &str, rest: &str) -> Call {
        let policy = if method == Method::GET {
            Policy::NetworkRead
        } else {
            Policy::NetworkWrite
        };
        let path = format!(
            "/subscriptions/{}/resourceGroups/{group}/providers/Microsoft.Network/{rest}",
            self.subscription()
        );
        Call::new(method, path, NETWORK, policy)
    }

    async fn get_network<T: DeserializeOwned>(&self, group: &str, rest: &str) -> Result<Option<T>, Error> {
        optional(self.read(self.network(Method::GET, group, rest)).await)
    }

    async fn put_network<T: Serialize + DeserializeOwned>(
        &self,
        group: &str,
        rest: &str,
        value: &T,
        when: When,
    ) -> Result<Put<T>, Error> {
        self.change(self.network(Method::PUT, group, rest).when(when).body(value)?)
            .await
    }

    pub async fn get_nic(&self, group: &str, name: &str) -> Result<Option<NetworkInterface>, Error> {
        self.get_network(group, &format!("networkInterfaces/{name}")).await
    }

    pub async fn put_nic(
        &self,
        group: &str,
        name: &str,
        nic: &NetworkInterface,
        when: When,
    ) -> Result<Put<NetworkInterface>, Error> {
        self.put_network(group, &format!("networkInterfaces/{name}"), nic, when)
            .await
    }

    pub async fn delete_nic(&self, group: &str, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.network(Method::DELETE, group, &format!("networkInterfaces/{name}")))
            .await
    }

    /// The interfaces of a Uniform scale set's instances, all in one list.
    pub async fn list_scale_set_nics(&self, group: &str, set: &str) -> Result<Vec<NetworkInterface>, Error> {
        let path = self.compute(group, &format!("virtualMachineScaleSets/{set}/networkInterfaces"));
        self.list(Call::new(Method::GET, path, "2018-10-01", Policy::NetworkRead))
            .await
    }

    pub async fn get_public_ip(&self, group: &str, name: &str) -> Result<Option<PublicIpAddress>, Error> {
        self.get_network(group, &format!("publicIPAddresses/{name}")).await
    }

    pub async fn put_public_ip(
        &self,
        group: &str,
        name: &str,
        address: &PublicIpAddress,
        when: When,
    ) -> Result<Put<PublicIpAddress>, Error> {
        self.put_network(group, &format!("publicIPAddresses/{name}"), address, when)
            .await
    }

    pub async fn delete_public_ip(&self, group: &str, name: &str) -> Result<Option<Operation>, Error> {
        self.start(self.network(Method::DELETE, group, &format!("publicIPAddresses/{name}")))
            .await
    }

    pub async fn get_subnet(&self, group: &str, vnet: &str, name: &str) -> Result<Option<Subnet>, Error> {
        self.get_network(group, &format!("virtualNetworks/{vnet}/subnets/{name}"))
            .await
    }

    pub async fn get_load_balancer(&self, group: &str, name: &str) -> Result<Option<LoadBalancer>, Error> {
        self.get_network(group, &format!("loadBalancers/{name}")).await
    }
}
