//! Azure's rules for names that become part of a Resource Manager address, as patterns of the schema. An empty name counts
//! as unset.

pub(super) const SUBSCRIPTION: &str = r"^([0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12})?$";
/// The directory of a sign-in, by its GUID or one of its domains: it becomes part of the authority's address.
pub(super) const TENANT: &str = r"^([A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?)?$";
pub(super) const RESOURCE_GROUP: &str = r"^([-\p{L}\p{M}\p{N}_.()]{0,89}[-\p{L}\p{M}\p{N}_()])?$";
pub(super) const VIRTUAL_NETWORK: &str = r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?)?$";
/// Subnets, load balancers and their backend pools.
pub(super) const RESOURCE: &str = r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,78}[A-Za-z0-9_])?)?$";
/// A region by its name or its display name.
pub(super) const LOCATION: &str = r"^[A-Za-z0-9 ]{0,64}$";
/// A VM size, such as Standard_D4s_v3.
pub(super) const VM_SIZE: &str = r"^[A-Za-z0-9_-]{0,64}$";
