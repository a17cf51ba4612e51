//! Network interfaces, public addresses, subnets and load balancers.

use crate::budget::policy::Policy;
use crate::client::{Call, Client, Put, When};
use crate::model::{LoadBalancer, NetworkInterface, PublicIpAddress, Subnet};
use crate::owned::Owned;
use crate::path::Path;
use crate::{Error, Operation};
use capstan_core::azure_names::AzureName;
use http::Method;

const NETWORK: &str = "2024-05-01";

impl Client {
    fn network(&self, group: &str) -> Result<Path, Error> {
        Ok(self.group(group)?.provider("Microsoft.Network"))
    }

    pub(crate) fn nic(&self, method: Method, group: &str, name: &str) -> Result<Call, Error> {
        let path = self
            .network(group)?
            .resource("networkInterfaces", AzureName::NetworkInterface, name)?;
        Ok(network_call(method, path))
    }

    pub async fn get_nic(&self, group: &str, name: &str) -> Result<Option<NetworkInterface>, Error> {
        self.get(self.nic(Method::GET, group, name)?).await
    }

    pub(crate) fn nics(&self, group: &str) -> Result<Call, Error> {
        let path = self.network(group)?.word("networkInterfaces");
        Ok(network_call(Method::GET, path))
    }

    pub async fn list_nics(&self, group: &str) -> Result<Vec<NetworkInterface>, Error> {
        self.list(self.nics(group)?).await
    }

    pub async fn put_nic(
        &self,
        group: &str,
        name: &str,
        nic: &NetworkInterface,
        when: When,
    ) -> Result<Put<NetworkInterface>, Error> {
        self.change(self.nic(Method::PUT, group, name)?.when(when).body(nic)?)
            .await
    }

    pub async fn delete_nic(&self, nic: &Owned<NetworkInterface>) -> Result<Option<Operation>, Error> {
        let (group, name) = self.own(nic)?;
        self.start(self.nic(Method::DELETE, group, name)?).await
    }

    pub(crate) fn public_ip(&self, method: Method, group: &str, name: &str) -> Result<Call, Error> {
        let path = self
            .network(group)?
            .resource("publicIPAddresses", AzureName::PublicIpAddress, name)?;
        Ok(network_call(method, path))
    }

    pub async fn get_public_ip(&self, group: &str, name: &str) -> Result<Option<PublicIpAddress>, Error> {
        self.get(self.public_ip(Method::GET, group, name)?).await
    }

    pub(crate) fn public_ips(&self, group: &str) -> Result<Call, Error> {
        let path = self.network(group)?.word("publicIPAddresses");
        Ok(network_call(Method::GET, path))
    }

    pub async fn list_public_ips(&self, group: &str) -> Result<Vec<PublicIpAddress>, Error> {
        self.list(self.public_ips(group)?).await
    }

    pub async fn put_public_ip(
        &self,
        group: &str,
        name: &str,
        address: &PublicIpAddress,
        when: When,
    ) -> Result<Put<PublicIpAddress>, Error> {
        let call = self.public_ip(Method::PUT, group, name)?;
        self.change(call.when(when).body(address)?).await
    }

    pub async fn delete_public_ip(&self, address: &Owned<PublicIpAddress>) -> Result<Option<Operation>, Error> {
        let (group, name) = self.own(address)?;
        self.start(self.public_ip(Method::DELETE, group, name)?).await
    }

    pub(crate) fn subnet(&self, group: &str, vnet: &str, name: &str) -> Result<Call, Error> {
        let path = self
            .network(group)?
            .resource("virtualNetworks", AzureName::VirtualNetwork, vnet)?
            .resource("subnets", AzureName::Subnet, name)?;
        Ok(network_call(Method::GET, path))
    }

    pub async fn get_subnet(&self, group: &str, vnet: &str, name: &str) -> Result<Option<Subnet>, Error> {
        self.get(self.subnet(group, vnet, name)?).await
    }

    pub(crate) fn load_balancer(&self, group: &str, name: &str) -> Result<Call, Error> {
        let path = self
            .network(group)?
            .resource("loadBalancers", AzureName::LoadBalancer, name)?;
        Ok(network_call(Method::GET, path))
    }

    pub async fn get_load_balancer(&self, group: &str, name: &str) -> Result<Option<LoadBalancer>, Error> {
        self.get(self.load_balancer(group, name)?).await
    }
}

fn network_call(method: Method, path: Path) -> Call {
    let policy = if method == Method::GET {
        Policy::NetworkRead
    } else {
        Policy::NetworkWrite
    };
    Call::new(method, path, NETWORK, policy)
}
