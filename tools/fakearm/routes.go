package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"sort"

	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v7"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/resources/armresources"
)

// route is one operation of the specification: how it is called, and the type of its body.
type route struct {
	method string
	path   *regexp.Regexp
	family string
	api    string
	body   func(raw []byte) (any, error)
	// Query parameters beside api-version.
	query []string
}

var apiVersion = regexp.MustCompile(`^20\d\d-\d\d-\d\d$`)

const (
	group   = `^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/`
	vm      = group + `Microsoft\.Compute/virtualMachines`
	vmss    = group + `Microsoft\.Compute/virtualMachineScaleSets`
	disk    = group + `Microsoft\.Compute/disks`
	aset    = group + `Microsoft\.Compute/availabilitySets`
	nic     = group + `Microsoft\.Network/networkInterfaces`
	ip      = group + `Microsoft\.Network/publicIPAddresses`
	vnet    = group + `Microsoft\.Network/virtualNetworks`
	lb      = group + `Microsoft\.Network/loadBalancers`
	rg      = `^/subscriptions/[^/]+/resourcegroups`
	one     = `/[^/]+$`
	compute = "compute"
	network = "network"
	general = "resources"
)

func op(method, path, family, api string, query ...string) route {
	return route{method: method, path: regexp.MustCompile(path), family: family, api: api, query: query}
}

func with[T any](r route) route {
	r.body = func(raw []byte) (any, error) {
		value := new(T)
		return value, json.Unmarshal(raw, value)
	}
	return r
}

var routes = []route{
	op("GET", vm+`$`, compute, "VirtualMachinesClient.NewListPager", "$filter", "$expand"),
	op("GET", vm+one, compute, "VirtualMachinesClient.Get", "$expand"),
	with[armcompute.VirtualMachine](op("PUT", vm+one, compute, "VirtualMachinesClient.BeginCreateOrUpdate")),
	with[armcompute.VirtualMachineUpdate](op("PATCH", vm+one, compute, "VirtualMachinesClient.BeginUpdate")),
	op("DELETE", vm+one, compute, "VirtualMachinesClient.BeginDelete", "forceDeletion"),
	op("POST", vm+`/[^/]+/start$`, compute, "VirtualMachinesClient.BeginStart"),
	op("POST", vm+`/[^/]+/deallocate$`, compute, "VirtualMachinesClient.BeginDeallocate"),
	op("POST", vm+`/[^/]+/restart$`, compute, "VirtualMachinesClient.BeginRestart"),
	op("POST", vm+`/[^/]+/powerOff$`, compute, "VirtualMachinesClient.BeginPowerOff"),
	op("POST", vm+`/[^/]+/simulateEviction$`, compute, "VirtualMachinesClient.SimulateEviction"),

	op("GET", vmss+`$`, compute, "VirtualMachineScaleSetsClient.NewListPager"),
	op("GET", vmss+one, compute, "VirtualMachineScaleSetsClient.Get", "$expand"),
	op("GET", vmss+`/[^/]+/instanceView$`, compute, "VirtualMachineScaleSetsClient.GetInstanceView"),
	with[armcompute.VirtualMachineScaleSet](op("PUT", vmss+one, compute, "VirtualMachineScaleSetsClient.BeginCreateOrUpdate")),
	with[armcompute.VirtualMachineScaleSetUpdate](op("PATCH", vmss+one, compute, "VirtualMachineScaleSetsClient.BeginUpdate")),
	op("DELETE", vmss+one, compute, "VirtualMachineScaleSetsClient.BeginDelete", "forceDeletion"),
	with[armcompute.VirtualMachineScaleSetVMInstanceRequiredIDs](op("POST", vmss+`/[^/]+/delete$`, compute, "VirtualMachineScaleSetsClient.BeginDeleteInstances", "forceDeletion")),
	with[armcompute.VirtualMachineScaleSetVMInstanceRequiredIDs](op("POST", vmss+`/[^/]+/manualupgrade$`, compute, "VirtualMachineScaleSetsClient.BeginUpdateInstances")),
	with[armcompute.VirtualMachineScaleSetReimageParameters](op("POST", vmss+`/[^/]+/reimage$`, compute, "VirtualMachineScaleSetsClient.BeginReimage")),
	op("GET", vmss+`/[^/]+/virtualMachines$`, compute, "VirtualMachineScaleSetVMsClient.NewListPager", "$filter", "$select", "$expand"),
	op("GET", vmss+`/[^/]+/virtualMachines`+one, compute, "VirtualMachineScaleSetVMsClient.Get", "$expand"),
	with[armcompute.VirtualMachineScaleSetVM](op("PUT", vmss+`/[^/]+/virtualMachines`+one, compute, "VirtualMachineScaleSetVMsClient.BeginUpdate")),

	op("GET", disk+`$`, compute, "DisksClient.NewListByResourceGroupPager"),
	op("GET", disk+one, compute, "DisksClient.Get"),
	with[armcompute.Disk](op("PUT", disk+one, compute, "DisksClient.BeginCreateOrUpdate")),
	with[armcompute.DiskUpdate](op("PATCH", disk+one, compute, "DisksClient.BeginUpdate")),
	op("DELETE", disk+one, compute, "DisksClient.BeginDelete"),
	op("GET", aset+`$`, compute, "AvailabilitySetsClient.NewListPager", "$expand"),
	op("GET", aset+one, compute, "AvailabilitySetsClient.Get"),
	with[armcompute.AvailabilitySet](op("PUT", aset+one, compute, "AvailabilitySetsClient.CreateOrUpdate")),
	op("DELETE", aset+one, compute, "AvailabilitySetsClient.Delete"),
	op("GET", `^/subscriptions/[^/]+/providers/Microsoft\.Compute/skus$`, compute, "ResourceSKUsClient.NewListPager", "$filter", "includeExtendedLocations"),
	op("GET", `^/subscriptions/[^/]+/providers/Microsoft\.Compute/locations/[^/]+/usages$`, compute, "UsageClient.NewListPager"),

	op("GET", nic+`$`, network, "InterfacesClient.NewListPager"),
	op("GET", nic+one, network, "InterfacesClient.Get", "$expand"),
	with[armnetwork.Interface](op("PUT", nic+one, network, "InterfacesClient.BeginCreateOrUpdate")),
	op("DELETE", nic+one, network, "InterfacesClient.BeginDelete"),
	op("GET", vmss+`/[^/]+/networkInterfaces$`, network, "InterfacesClient.NewListVirtualMachineScaleSetNetworkInterfacesPager"),
	op("GET", ip+`$`, network, "PublicIPAddressesClient.NewListPager"),
	op("GET", ip+one, network, "PublicIPAddressesClient.Get", "$expand"),
	with[armnetwork.PublicIPAddress](op("PUT", ip+one, network, "PublicIPAddressesClient.BeginCreateOrUpdate")),
	op("DELETE", ip+one, network, "PublicIPAddressesClient.BeginDelete"),
	op("GET", vnet+`/[^/]+/subnets`+one, network, "SubnetsClient.Get", "$expand"),
	op("GET", lb+one, network, "LoadBalancersClient.Get", "$expand"),

	op("GET", rg+one, general, "ResourceGroupsClient.Get"),
	with[armresources.ResourceGroup](op("PUT", rg+one, general, "ResourceGroupsClient.CreateOrUpdate")),
	op("DELETE", rg+one, general, "ResourceGroupsClient.BeginDelete", "forceDeletionTypes"),
	with[armresources.TagsPatchResource](op("PATCH", `/providers/Microsoft\.Resources/tags/default$`, general, "TagsClient.UpdateAtScope")),
}

func find(r *http.Request) *route {
	for i := range routes {
		if routes[i].method == r.Method && routes[i].path.MatchString(r.URL.Path) {
			return &routes[i]
		}
	}
	return nil
}

// fits tells what of a request the specification does not have.
func (r *route) fits(request *http.Request, raw []byte) error {
	for name := range request.URL.Query() {
		known := name == "api-version"
		for _, query := range r.query {
			known = known || query == name
		}
		if !known {
			return fmt.Errorf("query parameter %q is not of %s", name, r.api)
		}
	}
	if r.body == nil {
		if len(bytes.TrimSpace(raw)) > 0 {
			return fmt.Errorf("%s takes no body", r.api)
		}
		return nil
	}
	value, err := r.body(raw)
	if err != nil {
		return err
	}
	again, err := json.Marshal(value)
	if err != nil {
		return err
	}
	var given, typed any
	if err := json.Unmarshal(raw, &given); err != nil {
		return err
	}
	if err := json.Unmarshal(again, &typed); err != nil {
		return err
	}
	return lost("", given, typed)
}

// lost finds the first thing in a body that did not survive the way through Azure's type.
func lost(path string, given, typed any) error {
	switch given := given.(type) {
	case map[string]any:
		object, ok := typed.(map[string]any)
		if !ok {
			return fmt.Errorf("%s is no object in the specification", path)
		}
		names := make([]string, 0, len(given))
		for name := range given {
			names = append(names, name)
		}
		sort.Strings(names)
		for _, name := range names {
			value, ok := object[name]
			if !ok {
				return fmt.Errorf("%s.%s is not in the specification", path, name)
			}
			if err := lost(path+"."+name, given[name], value); err != nil {
				return err
			}
		}
	case []any:
		list, ok := typed.([]any)
		if !ok || len(list) != len(given) {
			return fmt.Errorf("%s is no such list in the specification", path)
		}
		for i := range given {
			if err := lost(fmt.Sprintf("%s[%d]", path, i), given[i], list[i]); err != nil {
				return err
			}
		}
	default:
		if !reflect.DeepEqual(given, typed) {
			return fmt.Errorf("%s: %v became %v", path, given, typed)
		}
	}
	return nil
}
