//! Scale sets, their model and their instances.

use super::{
    AdditionalCapabilities, BillingProfile, CapacityReservationProfile, DataDisk, DiagnosticsProfile, DiffDiskSettings,
    HardwareProfile, ImageReference, InstanceViewStatus, ManagedDiskParameters, ManagedIdentities, NetworkProfile,
    OsDisk, Plan, PowerState, ProvisioningState, SecurityProfile, Sku, SubResource, Tags, WindowsConfiguration, model,
    view,
};

model! {
    ScaleSet {
        id: String,
        name: String,
        location: String,
        tags: Tags,
        zones: Vec<String>,
        sku: Sku,
        plan: Plan,
        identity: ManagedIdentities,
        etag: String,
        properties: ScaleSetProperties,
    }
    ScaleSetProperties {
        provisioning_state: String,
        unique_id: String,
        /// `Uniform` or `Flexible`.
        orchestration_mode: String,
        overprovision: bool,
        single_placement_group: bool,
        platform_fault_domain_count: i32,
        zone_balance: bool,
        upgrade_policy: UpgradePolicy,
        scale_in_policy: ScaleInPolicy,
        additional_capabilities: AdditionalCapabilities,
        virtual_machine_profile: VirtualMachineProfile,
        time_created: String,
    }
    UpgradePolicy { mode: String }
    ScaleInPolicy { rules: Vec<String>, force_deletion: bool }
    VirtualMachineProfile {
        os_profile: ScaleSetOsProfile,
        storage_profile: ScaleSetStorageProfile,
        network_profile: ScaleSetNetworkProfile,
        security_profile: SecurityProfile,
        diagnostics_profile: DiagnosticsProfile,
        extension_profile: ExtensionProfile,
        scheduled_events_profile: ScheduledEventsProfile,
        capacity_reservation: CapacityReservationProfile,
        priority: String,
        eviction_policy: String,
        billing_profile: BillingProfile,
    }
    ScaleSetOsProfile {
        computer_name_prefix: String,
        admin_username: String,
        admin_password: String,
        custom_data: String,
        linux_configuration: super::LinuxConfiguration,
        windows_configuration: WindowsConfiguration,
    }
    ScaleSetStorageProfile {
        image_reference: ImageReference,
        os_disk: ScaleSetOsDisk,
        data_disks: Vec<ScaleSetDataDisk>,
    }
    ScaleSetOsDisk {
        name: String,
        os_type: String,
        create_option: String,
        delete_option: String,
        caching: String,
        #[serde(rename = "diskSizeGB")]
        disk_size_gb: i32,
        managed_disk: ManagedDiskParameters,
        diff_disk_settings: DiffDiskSettings,
    }
    ScaleSetDataDisk {
        name: String,
        lun: i32,
        create_option: String,
        delete_option: String,
        caching: String,
        #[serde(rename = "diskSizeGB")]
        disk_size_gb: i32,
        #[serde(rename = "diskIOPSReadWrite")]
        disk_iops_read_write: i64,
        #[serde(rename = "diskMBpsReadWrite")]
        disk_mbps_read_write: i64,
        managed_disk: ManagedDiskParameters,
    }
    ScaleSetNetworkProfile {
        network_api_version: String,
        health_probe: SubResource,
        network_interface_configurations: Vec<ScaleSetNetworkConfiguration>,
    }
    ScaleSetNetworkConfiguration { name: String, properties: ScaleSetNetworkConfigurationProperties }
    ScaleSetNetworkConfigurationProperties {
        primary: bool,
        enable_accelerated_networking: bool,
        #[serde(rename = "enableIPForwarding")]
        enable_ip_forwarding: bool,
        delete_option: String,
        network_security_group: SubResource,
        ip_configurations: Vec<ScaleSetIpConfiguration>,
    }
    ScaleSetIpConfiguration { name: String, properties: ScaleSetIpConfigurationProperties }
    ScaleSetIpConfigurationProperties {
        primary: bool,
        #[serde(rename = "privateIPAddressVersion")]
        private_ip_address_version: String,
        subnet: SubResource,
        #[serde(rename = "publicIPAddressConfiguration")]
        public_ip_address_configuration: serde_json::Value,
        load_balancer_backend_address_pools: Vec<SubResource>,
        load_balancer_inbound_nat_pools: Vec<SubResource>,
        application_security_groups: Vec<SubResource>,
    }
    ExtensionProfile { extensions: Vec<Extension> }
    Extension { name: String, properties: ExtensionProperties }
    ExtensionProperties {
        publisher: String,
        #[serde(rename = "type")]
        kind: String,
        type_handler_version: String,
        auto_upgrade_minor_version: bool,
        settings: serde_json::Value,
        protected_settings: serde_json::Value,
    }
    ScheduledEventsProfile { terminate_notification_profile: TerminateNotificationProfile }
    TerminateNotificationProfile { enable: bool, not_before_timeout: String }
}

view! {
    /// One instance of a Uniform scale set, as the list shows it.
    Instance {
        id: String,
        name: String,
        instance_id: String,
        location: String,
        zones: Vec<String>,
        tags: Tags,
        sku: Sku,
        etag: String,
        properties: InstanceProperties,
    }
    InstanceProperties {
        latest_model_applied: bool,
        vm_id: String,
        provisioning_state: String,
        instance_view: ScaleSetInstanceView,
        hardware_profile: HardwareProfile,
        storage_profile: InstanceStorageProfile,
        os_profile: InstanceOsProfile,
        network_profile: NetworkProfile,
        protection_policy: ProtectionPolicy,
        time_created: String,
    }
    InstanceStorageProfile { image_reference: ImageReference, os_disk: OsDisk, data_disks: Vec<DataDisk> }
    InstanceOsProfile { computer_name: String }
    ScaleSetInstanceView { statuses: Vec<InstanceViewStatus>, computer_name: String }
    ProtectionPolicy { protect_from_scale_in: bool, protect_from_scale_set_actions: bool }
    /// The body of `manualupgrade`, `delete`, `reimage` and their like.
    InstanceIds { instance_ids: Vec<String> }
    ScaleSetView { virtual_machine: ScaleSetViewSummary, statuses: Vec<InstanceViewStatus> }
    ScaleSetViewSummary { statuses_summary: Vec<StatusCount> }
    StatusCount { code: String, count: i64 }
}

impl ScaleSet {
    pub fn provisioning_state(&self) -> ProvisioningState {
        let properties = self.properties.as_ref();
        ProvisioningState::of(properties.and_then(|properties| properties.provisioning_state.as_deref()))
    }

    pub fn capacity(&self) -> i64 {
        self.sku.as_ref().and_then(|sku| sku.capacity).unwrap_or_default()
    }

    pub fn is_flexible(&self) -> bool {
        self.properties
            .as_ref()
            .and_then(|properties| properties.orchestration_mode.as_deref())
            .is_some_and(|mode| mode.eq_ignore_ascii_case("Flexible"))
    }
}

impl Instance {
    pub fn latest_model_applied(&self) -> bool {
        self.properties
            .as_ref()
            .and_then(|properties| properties.latest_model_applied)
            .unwrap_or_default()
    }

    pub fn provisioning_state(&self) -> ProvisioningState {
        let properties = self.properties.as_ref();
        ProvisioningState::of(properties.and_then(|properties| properties.provisioning_state.as_deref()))
    }

    pub fn power_state(&self) -> Option<PowerState> {
        super::power_state(self.properties.as_ref()?.instance_view.as_ref()?.statuses.as_deref()?)
    }
}
