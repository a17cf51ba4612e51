//! Virtual machines and availability sets.

use super::{
    InstanceViewStatus, ManagedIdentities, Plan, PowerState, ProvisioningState, Sku, SubResource, Tags, model, view,
};

model! {
    VirtualMachine {
        id: String,
        name: String,
        location: String,
        tags: Tags,
        zones: Vec<String>,
        identity: ManagedIdentities,
        plan: Plan,
        properties: VirtualMachineProperties,
        etag: String,
    }
    VirtualMachineProperties {
        vm_id: String,
        provisioning_state: String,
        hardware_profile: HardwareProfile,
        storage_profile: StorageProfile,
        os_profile: OsProfile,
        network_profile: NetworkProfile,
        security_profile: SecurityProfile,
        diagnostics_profile: DiagnosticsProfile,
        additional_capabilities: AdditionalCapabilities,
        availability_set: SubResource,
        virtual_machine_scale_set: SubResource,
        capacity_reservation: CapacityReservationProfile,
        priority: String,
        eviction_policy: String,
        billing_profile: BillingProfile,
        instance_view: InstanceView,
        time_created: String,
    }
    HardwareProfile { vm_size: String }
    AdditionalCapabilities {
        #[serde(rename = "ultraSSDEnabled")]
        ultra_ssd_enabled: bool,
    }
    CapacityReservationProfile { capacity_reservation_group: SubResource }
    BillingProfile { max_price: f64 }
    StorageProfile {
        image_reference: ImageReference,
        os_disk: OsDisk,
        data_disks: Vec<DataDisk>,
        disk_controller_type: String,
    }
    ImageReference {
        id: String,
        publisher: String,
        offer: String,
        sku: String,
        version: String,
        community_gallery_image_id: String,
        shared_gallery_image_id: String,
    }
    OsDisk {
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
    DiffDiskSettings { option: String, placement: String }
    DataDisk {
        name: String,
        lun: i32,
        create_option: String,
        delete_option: String,
        caching: String,
        #[serde(rename = "diskSizeGB")]
        disk_size_gb: i32,
        managed_disk: ManagedDiskParameters,
        to_be_detached: bool,
    }
    ManagedDiskParameters {
        id: String,
        storage_account_type: String,
        disk_encryption_set: SubResource,
        security_profile: DiskSecurityProfile,
    }
    DiskSecurityProfile { security_encryption_type: String, disk_encryption_set: SubResource }
    OsProfile {
        computer_name: String,
        admin_username: String,
        admin_password: String,
        custom_data: String,
        linux_configuration: LinuxConfiguration,
        windows_configuration: WindowsConfiguration,
    }
    LinuxConfiguration { disable_password_authentication: bool, ssh: SshConfiguration }
    SshConfiguration { public_keys: Vec<SshPublicKey> }
    SshPublicKey { path: String, key_data: String }
    WindowsConfiguration { enable_automatic_updates: bool, additional_unattend_content: Vec<UnattendContent> }
    UnattendContent { pass_name: String, component_name: String, setting_name: String, content: String }
    NetworkProfile { network_interfaces: Vec<NetworkInterfaceReference> }
    NetworkInterfaceReference { id: String, properties: NetworkInterfaceReferenceProperties }
    NetworkInterfaceReferenceProperties { primary: bool, delete_option: String }
    SecurityProfile { encryption_at_host: bool, security_type: String, uefi_settings: UefiSettings }
    UefiSettings { secure_boot_enabled: bool, v_tpm_enabled: bool }
    DiagnosticsProfile { boot_diagnostics: BootDiagnostics }
    BootDiagnostics { enabled: bool, storage_uri: String }
    AvailabilitySet {
        id: String,
        name: String,
        location: String,
        tags: Tags,
        sku: Sku,
        properties: AvailabilitySetProperties,
    }
    AvailabilitySetProperties {
        platform_fault_domain_count: i32,
        platform_update_domain_count: i32,
        virtual_machines: Vec<SubResource>,
    }
}

view! {
    InstanceView { statuses: Vec<InstanceViewStatus>, computer_name: String, os_name: String }
    /// The body of a PATCH that changes disks' fate only.
    VirtualMachineUpdate { properties: VirtualMachineProperties, tags: Tags }
}

impl VirtualMachine {
    pub fn provisioning_state(&self) -> ProvisioningState {
        let properties = self.properties.as_ref();
        ProvisioningState::of(properties.and_then(|properties| properties.provisioning_state.as_deref()))
    }

    pub fn data_disks(&self) -> &[DataDisk] {
        self.properties
            .as_ref()
            .and_then(|properties| properties.storage_profile.as_ref()?.data_disks.as_deref())
            .unwrap_or_default()
    }

    pub fn power_state(&self) -> Option<PowerState> {
        super::power_state(self.properties.as_ref()?.instance_view.as_ref()?.statuses.as_deref()?)
    }
}
