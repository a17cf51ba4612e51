package main

import (
	"context"
	"net/http"

	azfake "github.com/Azure/azure-sdk-for-go/sdk/azcore/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	computefake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v7"
	networkfake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v7/fake"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/resources/armresources"
	resourcesfake "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/resources/armresources/fake"
)

func newServers() map[string]doer {
	return map[string]doer{
		compute: computefake.NewServerFactoryTransport(computeServers()),
		network: networkfake.NewServerFactoryTransport(networkServers()),
		general: resourcesfake.NewServerFactoryTransport(resourcesServers()),
	}
}

// done is a long-running operation that ended at once.
func done[T any](status int, value T) (responder azfake.PollerResponder[T], failed azfake.ErrorResponder) {
	responder.SetTerminalResponse(status, value, nil)
	return
}

func answer[T any](status int, value T) (responder azfake.Responder[T], failed azfake.ErrorResponder) {
	responder.SetResponse(status, value, nil)
	return
}

func page[T any](value T) (responder azfake.PagerResponder[T]) {
	responder.AddPage(http.StatusOK, value, nil)
	return
}

func computeServers() *computefake.ServerFactory {
	return &computefake.ServerFactory{
		VirtualMachinesServer:           vmServer(),
		VirtualMachineScaleSetsServer:   setServer(),
		VirtualMachineScaleSetVMsServer: instanceServer(),
		DisksServer:                     diskServer(),
		AvailabilitySetsServer: computefake.AvailabilitySetsServer{
			Get: func(_ context.Context, _, name string, _ *armcompute.AvailabilitySetsClientGetOptions) (azfake.Responder[armcompute.AvailabilitySetsClientGetResponse], azfake.ErrorResponder) {
				return answer(200, armcompute.AvailabilitySetsClientGetResponse{AvailabilitySet: armcompute.AvailabilitySet{Name: &name, Location: to.Ptr("westus")}})
			},
			CreateOrUpdate: func(_ context.Context, _, _ string, set armcompute.AvailabilitySet, _ *armcompute.AvailabilitySetsClientCreateOrUpdateOptions) (azfake.Responder[armcompute.AvailabilitySetsClientCreateOrUpdateResponse], azfake.ErrorResponder) {
				return answer(200, armcompute.AvailabilitySetsClientCreateOrUpdateResponse{AvailabilitySet: set})
			},
			NewListPager: func(string, *armcompute.AvailabilitySetsClientListOptions) azfake.PagerResponder[armcompute.AvailabilitySetsClientListResponse] {
				set := &armcompute.AvailabilitySet{Name: to.Ptr("a"), Location: to.Ptr("westus")}
				return page(armcompute.AvailabilitySetsClientListResponse{AvailabilitySetListResult: armcompute.AvailabilitySetListResult{Value: []*armcompute.AvailabilitySet{set}}})
			},
			Delete: func(context.Context, string, string, *armcompute.AvailabilitySetsClientDeleteOptions) (azfake.Responder[armcompute.AvailabilitySetsClientDeleteResponse], azfake.ErrorResponder) {
				return answer(200, armcompute.AvailabilitySetsClientDeleteResponse{})
			},
		},
		UsageServer: computefake.UsageServer{
			NewListPager: func(string, *armcompute.UsageClientListOptions) azfake.PagerResponder[armcompute.UsageClientListResponse] {
				usage := &armcompute.Usage{Unit: to.Ptr("Count"), CurrentValue: to.Ptr[int32](4), Limit: to.Ptr[int64](10), Name: &armcompute.UsageName{Value: to.Ptr("cores")}}
				return page(armcompute.UsageClientListResponse{ListUsagesResult: armcompute.ListUsagesResult{Value: []*armcompute.Usage{usage}}})
			},
		},
		ResourceSKUsServer: computefake.ResourceSKUsServer{
			NewListPager: func(*armcompute.ResourceSKUsClientListOptions) azfake.PagerResponder[armcompute.ResourceSKUsClientListResponse] {
				size := &armcompute.ResourceSKU{Name: to.Ptr("Standard_D4s_v3"), ResourceType: to.Ptr("virtualMachines"), Locations: []*string{to.Ptr("eastus")},
					LocationInfo: []*armcompute.ResourceSKULocationInfo{{Location: to.Ptr("eastus"), Zones: []*string{to.Ptr("1")},
						ZoneDetails: []*armcompute.ResourceSKUZoneDetails{{Name: []*string{to.Ptr("1")}, Capabilities: []*armcompute.ResourceSKUCapabilities{
							{Name: to.Ptr("UltraSSDAvailable"), Value: to.Ptr("True")}}}}}},
					Capabilities: []*armcompute.ResourceSKUCapabilities{{Name: to.Ptr("MaxDataDiskCount"), Value: to.Ptr("8")}}}
				return page(armcompute.ResourceSKUsClientListResponse{ResourceSKUsResult: armcompute.ResourceSKUsResult{Value: []*armcompute.ResourceSKU{size}}})
			},
		},
	}
}

func vmServer() computefake.VirtualMachinesServer {
	machine := func(name string) armcompute.VirtualMachine {
		return armcompute.VirtualMachine{Name: &name, Location: to.Ptr("eastus"), Properties: &armcompute.VirtualMachineProperties{ProvisioningState: to.Ptr("Succeeded")}}
	}
	return computefake.VirtualMachinesServer{
		Get: func(_ context.Context, _, name string, _ *armcompute.VirtualMachinesClientGetOptions) (azfake.Responder[armcompute.VirtualMachinesClientGetResponse], azfake.ErrorResponder) {
			return answer(200, armcompute.VirtualMachinesClientGetResponse{VirtualMachine: machine(name)})
		},
		NewListPager: func(string, *armcompute.VirtualMachinesClientListOptions) azfake.PagerResponder[armcompute.VirtualMachinesClientListResponse] {
			vm := machine("one")
			return page(armcompute.VirtualMachinesClientListResponse{VirtualMachineListResult: armcompute.VirtualMachineListResult{Value: []*armcompute.VirtualMachine{&vm}}})
		},
		BeginCreateOrUpdate: func(_ context.Context, _, name string, vm armcompute.VirtualMachine, _ *armcompute.VirtualMachinesClientBeginCreateOrUpdateOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientCreateOrUpdateResponse], azfake.ErrorResponder) {
			vm.Name = &name
			return done(201, armcompute.VirtualMachinesClientCreateOrUpdateResponse{VirtualMachine: vm})
		},
		BeginUpdate: func(_ context.Context, _, name string, _ armcompute.VirtualMachineUpdate, _ *armcompute.VirtualMachinesClientBeginUpdateOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientUpdateResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachinesClientUpdateResponse{VirtualMachine: machine(name)})
		},
		BeginDelete: func(context.Context, string, string, *armcompute.VirtualMachinesClientBeginDeleteOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientDeleteResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachinesClientDeleteResponse{})
		},
		BeginStart: func(context.Context, string, string, *armcompute.VirtualMachinesClientBeginStartOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientStartResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachinesClientStartResponse{})
		},
		BeginDeallocate: func(context.Context, string, string, *armcompute.VirtualMachinesClientBeginDeallocateOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientDeallocateResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachinesClientDeallocateResponse{})
		},
		BeginRestart: func(context.Context, string, string, *armcompute.VirtualMachinesClientBeginRestartOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientRestartResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachinesClientRestartResponse{})
		},
		BeginPowerOff: func(context.Context, string, string, *armcompute.VirtualMachinesClientBeginPowerOffOptions) (azfake.PollerResponder[armcompute.VirtualMachinesClientPowerOffResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachinesClientPowerOffResponse{})
		},
		SimulateEviction: func(context.Context, string, string, *armcompute.VirtualMachinesClientSimulateEvictionOptions) (azfake.Responder[armcompute.VirtualMachinesClientSimulateEvictionResponse], azfake.ErrorResponder) {
			return answer(204, armcompute.VirtualMachinesClientSimulateEvictionResponse{})
		},
	}
}

func setServer() computefake.VirtualMachineScaleSetsServer {
	named := func(name string) armcompute.VirtualMachineScaleSet {
		return armcompute.VirtualMachineScaleSet{Name: &name, Location: to.Ptr("eastus"), SKU: &armcompute.SKU{Name: to.Ptr("Standard_D4s_v3"), Capacity: to.Ptr[int64](3)}}
	}
	return computefake.VirtualMachineScaleSetsServer{
		Get: func(_ context.Context, _, name string, _ *armcompute.VirtualMachineScaleSetsClientGetOptions) (azfake.Responder[armcompute.VirtualMachineScaleSetsClientGetResponse], azfake.ErrorResponder) {
			return answer(200, armcompute.VirtualMachineScaleSetsClientGetResponse{VirtualMachineScaleSet: named(name)})
		},
		NewListPager: func(string, *armcompute.VirtualMachineScaleSetsClientListOptions) azfake.PagerResponder[armcompute.VirtualMachineScaleSetsClientListResponse] {
			set := named("one")
			return page(armcompute.VirtualMachineScaleSetsClientListResponse{VirtualMachineScaleSetListResult: armcompute.VirtualMachineScaleSetListResult{Value: []*armcompute.VirtualMachineScaleSet{&set}}})
		},
		GetInstanceView: func(context.Context, string, string, *armcompute.VirtualMachineScaleSetsClientGetInstanceViewOptions) (azfake.Responder[armcompute.VirtualMachineScaleSetsClientGetInstanceViewResponse], azfake.ErrorResponder) {
			return answer(200, armcompute.VirtualMachineScaleSetsClientGetInstanceViewResponse{})
		},
		BeginCreateOrUpdate: func(_ context.Context, _, name string, set armcompute.VirtualMachineScaleSet, _ *armcompute.VirtualMachineScaleSetsClientBeginCreateOrUpdateOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientCreateOrUpdateResponse], azfake.ErrorResponder) {
			set.Name = &name
			return done(201, armcompute.VirtualMachineScaleSetsClientCreateOrUpdateResponse{VirtualMachineScaleSet: set})
		},
		BeginUpdate: func(_ context.Context, _, name string, _ armcompute.VirtualMachineScaleSetUpdate, _ *armcompute.VirtualMachineScaleSetsClientBeginUpdateOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientUpdateResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachineScaleSetsClientUpdateResponse{VirtualMachineScaleSet: named(name)})
		},
		BeginDelete: func(context.Context, string, string, *armcompute.VirtualMachineScaleSetsClientBeginDeleteOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientDeleteResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachineScaleSetsClientDeleteResponse{})
		},
		BeginDeleteInstances: func(context.Context, string, string, armcompute.VirtualMachineScaleSetVMInstanceRequiredIDs, *armcompute.VirtualMachineScaleSetsClientBeginDeleteInstancesOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientDeleteInstancesResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachineScaleSetsClientDeleteInstancesResponse{})
		},
		BeginUpdateInstances: func(context.Context, string, string, armcompute.VirtualMachineScaleSetVMInstanceRequiredIDs, *armcompute.VirtualMachineScaleSetsClientBeginUpdateInstancesOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientUpdateInstancesResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachineScaleSetsClientUpdateInstancesResponse{})
		},
		BeginReimage: func(context.Context, string, string, *armcompute.VirtualMachineScaleSetsClientBeginReimageOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetsClientReimageResponse], azfake.ErrorResponder) {
			return done(200, armcompute.VirtualMachineScaleSetsClientReimageResponse{})
		},
	}
}

func instanceServer() computefake.VirtualMachineScaleSetVMsServer {
	return computefake.VirtualMachineScaleSetVMsServer{
		NewListPager: func(string, string, *armcompute.VirtualMachineScaleSetVMsClientListOptions) azfake.PagerResponder[armcompute.VirtualMachineScaleSetVMsClientListResponse] {
			vm := armcompute.VirtualMachineScaleSetVM{InstanceID: to.Ptr("3"), Location: to.Ptr("eastus")}
			return page(armcompute.VirtualMachineScaleSetVMsClientListResponse{VirtualMachineScaleSetVMListResult: armcompute.VirtualMachineScaleSetVMListResult{Value: []*armcompute.VirtualMachineScaleSetVM{&vm}}})
		},
		Get: func(_ context.Context, _, _, id string, _ *armcompute.VirtualMachineScaleSetVMsClientGetOptions) (azfake.Responder[armcompute.VirtualMachineScaleSetVMsClientGetResponse], azfake.ErrorResponder) {
			return answer(200, armcompute.VirtualMachineScaleSetVMsClientGetResponse{VirtualMachineScaleSetVM: armcompute.VirtualMachineScaleSetVM{InstanceID: &id, Location: to.Ptr("eastus")}})
		},
		BeginUpdate: func(_ context.Context, _, _, id string, vm armcompute.VirtualMachineScaleSetVM, _ *armcompute.VirtualMachineScaleSetVMsClientBeginUpdateOptions) (azfake.PollerResponder[armcompute.VirtualMachineScaleSetVMsClientUpdateResponse], azfake.ErrorResponder) {
			vm.InstanceID = &id
			return done(200, armcompute.VirtualMachineScaleSetVMsClientUpdateResponse{VirtualMachineScaleSetVM: vm})
		},
	}
}

func diskServer() computefake.DisksServer {
	named := func(name string) armcompute.Disk { return armcompute.Disk{Name: &name, Location: to.Ptr("eastus")} }
	return computefake.DisksServer{
		Get: func(_ context.Context, _, name string, _ *armcompute.DisksClientGetOptions) (azfake.Responder[armcompute.DisksClientGetResponse], azfake.ErrorResponder) {
			return answer(200, armcompute.DisksClientGetResponse{Disk: named(name)})
		},
		NewListByResourceGroupPager: func(string, *armcompute.DisksClientListByResourceGroupOptions) azfake.PagerResponder[armcompute.DisksClientListByResourceGroupResponse] {
			disk := named("one")
			return page(armcompute.DisksClientListByResourceGroupResponse{DiskList: armcompute.DiskList{Value: []*armcompute.Disk{&disk}}})
		},
		BeginCreateOrUpdate: func(_ context.Context, _, name string, disk armcompute.Disk, _ *armcompute.DisksClientBeginCreateOrUpdateOptions) (azfake.PollerResponder[armcompute.DisksClientCreateOrUpdateResponse], azfake.ErrorResponder) {
			disk.Name = &name
			return done(200, armcompute.DisksClientCreateOrUpdateResponse{Disk: disk})
		},
		BeginUpdate: func(_ context.Context, _, name string, _ armcompute.DiskUpdate, _ *armcompute.DisksClientBeginUpdateOptions) (azfake.PollerResponder[armcompute.DisksClientUpdateResponse], azfake.ErrorResponder) {
			return done(200, armcompute.DisksClientUpdateResponse{Disk: named(name)})
		},
		BeginDelete: func(context.Context, string, string, *armcompute.DisksClientBeginDeleteOptions) (azfake.PollerResponder[armcompute.DisksClientDeleteResponse], azfake.ErrorResponder) {
			return done(204, armcompute.DisksClientDeleteResponse{})
		},
	}
}

func networkServers() *networkfake.ServerFactory {
	return &networkfake.ServerFactory{
		InterfacesServer: networkfake.InterfacesServer{
			Get: func(_ context.Context, _, name string, _ *armnetwork.InterfacesClientGetOptions) (azfake.Responder[armnetwork.InterfacesClientGetResponse], azfake.ErrorResponder) {
				return answer(200, armnetwork.InterfacesClientGetResponse{Interface: armnetwork.Interface{Name: &name}})
			},
			BeginCreateOrUpdate: func(_ context.Context, _, name string, nic armnetwork.Interface, _ *armnetwork.InterfacesClientBeginCreateOrUpdateOptions) (azfake.PollerResponder[armnetwork.InterfacesClientCreateOrUpdateResponse], azfake.ErrorResponder) {
				nic.Name = &name
				return done(201, armnetwork.InterfacesClientCreateOrUpdateResponse{Interface: nic})
			},
			BeginDelete: func(context.Context, string, string, *armnetwork.InterfacesClientBeginDeleteOptions) (azfake.PollerResponder[armnetwork.InterfacesClientDeleteResponse], azfake.ErrorResponder) {
				return done(204, armnetwork.InterfacesClientDeleteResponse{})
			},
			NewListPager: func(string, *armnetwork.InterfacesClientListOptions) azfake.PagerResponder[armnetwork.InterfacesClientListResponse] {
				return page(armnetwork.InterfacesClientListResponse{InterfaceListResult: armnetwork.InterfaceListResult{Value: []*armnetwork.Interface{{Name: to.Ptr("nic")}}}})
			},
			NewListVirtualMachineScaleSetNetworkInterfacesPager: func(string, string, *armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesOptions) azfake.PagerResponder[armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesResponse] {
				return page(armnetwork.InterfacesClientListVirtualMachineScaleSetNetworkInterfacesResponse{InterfaceListResult: armnetwork.InterfaceListResult{Value: []*armnetwork.Interface{{Name: to.Ptr("nic")}}}})
			},
		},
		PublicIPAddressesServer: networkfake.PublicIPAddressesServer{
			NewListPager: func(string, *armnetwork.PublicIPAddressesClientListOptions) azfake.PagerResponder[armnetwork.PublicIPAddressesClientListResponse] {
				return page(armnetwork.PublicIPAddressesClientListResponse{PublicIPAddressListResult: armnetwork.PublicIPAddressListResult{Value: []*armnetwork.PublicIPAddress{{Name: to.Ptr("ip")}}}})
			},
			Get: func(_ context.Context, _, name string, _ *armnetwork.PublicIPAddressesClientGetOptions) (azfake.Responder[armnetwork.PublicIPAddressesClientGetResponse], azfake.ErrorResponder) {
				return answer(200, armnetwork.PublicIPAddressesClientGetResponse{PublicIPAddress: armnetwork.PublicIPAddress{Name: &name}})
			},
			BeginCreateOrUpdate: func(_ context.Context, _, name string, ip armnetwork.PublicIPAddress, _ *armnetwork.PublicIPAddressesClientBeginCreateOrUpdateOptions) (azfake.PollerResponder[armnetwork.PublicIPAddressesClientCreateOrUpdateResponse], azfake.ErrorResponder) {
				ip.Name = &name
				return done(201, armnetwork.PublicIPAddressesClientCreateOrUpdateResponse{PublicIPAddress: ip})
			},
			BeginDelete: func(context.Context, string, string, *armnetwork.PublicIPAddressesClientBeginDeleteOptions) (azfake.PollerResponder[armnetwork.PublicIPAddressesClientDeleteResponse], azfake.ErrorResponder) {
				return done(204, armnetwork.PublicIPAddressesClientDeleteResponse{})
			},
		},
		SubnetsServer: networkfake.SubnetsServer{
			Get: func(_ context.Context, _, _, name string, _ *armnetwork.SubnetsClientGetOptions) (azfake.Responder[armnetwork.SubnetsClientGetResponse], azfake.ErrorResponder) {
				return answer(200, armnetwork.SubnetsClientGetResponse{Subnet: armnetwork.Subnet{Name: &name}})
			},
		},
		LoadBalancersServer: networkfake.LoadBalancersServer{
			Get: func(_ context.Context, _, name string, _ *armnetwork.LoadBalancersClientGetOptions) (azfake.Responder[armnetwork.LoadBalancersClientGetResponse], azfake.ErrorResponder) {
				return answer(200, armnetwork.LoadBalancersClientGetResponse{LoadBalancer: armnetwork.LoadBalancer{Name: &name}})
			},
		},
	}
}

func resourcesServers() *resourcesfake.ServerFactory {
	return &resourcesfake.ServerFactory{
		ResourceGroupsServer: resourcesfake.ResourceGroupsServer{
			Get: func(_ context.Context, name string, _ *armresources.ResourceGroupsClientGetOptions) (azfake.Responder[armresources.ResourceGroupsClientGetResponse], azfake.ErrorResponder) {
				return answer(200, armresources.ResourceGroupsClientGetResponse{ResourceGroup: armresources.ResourceGroup{Name: &name, Location: to.Ptr("eastus")}})
			},
			CreateOrUpdate: func(_ context.Context, name string, group armresources.ResourceGroup, _ *armresources.ResourceGroupsClientCreateOrUpdateOptions) (azfake.Responder[armresources.ResourceGroupsClientCreateOrUpdateResponse], azfake.ErrorResponder) {
				group.Name = &name
				return answer(201, armresources.ResourceGroupsClientCreateOrUpdateResponse{ResourceGroup: group})
			},
			BeginDelete: func(context.Context, string, *armresources.ResourceGroupsClientBeginDeleteOptions) (azfake.PollerResponder[armresources.ResourceGroupsClientDeleteResponse], azfake.ErrorResponder) {
				return done(200, armresources.ResourceGroupsClientDeleteResponse{})
			},
		},
		TagsServer: resourcesfake.TagsServer{
			UpdateAtScope: func(_ context.Context, _ string, patch armresources.TagsPatchResource, _ *armresources.TagsClientUpdateAtScopeOptions) (azfake.Responder[armresources.TagsClientUpdateAtScopeResponse], azfake.ErrorResponder) {
				return answer(200, armresources.TagsClientUpdateAtScopeResponse{TagsResource: armresources.TagsResource{Properties: patch.Properties}})
			},
		},
	}
}
