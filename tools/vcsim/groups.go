package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/types"
)

// makeGroups makes, in the first compute cluster, what -host-group asks for: a group of machines, a group with the first
// host, and a rule that ties them together.
func (w *world) makeGroups(ctx context.Context, specs listFlag) error {
	if len(specs) == 0 {
		return nil
	}
	client, err := vim25.NewClient(ctx, w.service)
	if err != nil {
		return err
	}
	finder := find.NewFinder(client, false)
	datacenters, err := finder.DatacenterList(ctx, "*")
	if err != nil {
		return err
	}
	finder.SetDatacenter(datacenters[0])
	clusters, err := finder.ClusterComputeResourceList(ctx, "*")
	if err != nil {
		return err
	}
	hosts, err := clusters[0].Hosts(ctx)
	if err != nil {
		return err
	}
	for _, text := range specs {
		machines, group, enabled, err := parseGroup(text)
		if err != nil {
			return err
		}
		add := types.ArrayUpdateSpec{Operation: types.ArrayUpdateOperationAdd}
		spec := &types.ClusterConfigSpecEx{
			GroupSpec: []types.ClusterGroupSpec{
				{ArrayUpdateSpec: add, Info: &types.ClusterVmGroup{ClusterGroupInfo: types.ClusterGroupInfo{Name: machines}}},
				{ArrayUpdateSpec: add, Info: &types.ClusterHostGroup{
					ClusterGroupInfo: types.ClusterGroupInfo{Name: group},
					Host:             []types.ManagedObjectReference{hosts[0].Reference()},
				}},
			},
			RulesSpec: []types.ClusterRuleSpec{{ArrayUpdateSpec: add, Info: &types.ClusterVmHostRuleInfo{
				ClusterRuleInfo: types.ClusterRuleInfo{Name: machines + "-" + group, Enabled: types.NewBool(enabled)},
				VmGroupName:     machines, AffineHostGroupName: group,
			}}},
		}
		task, err := clusters[0].Reconfigure(ctx, spec, true)
		if err != nil {
			return err
		}
		if err := task.Wait(ctx); err != nil {
			return fmt.Errorf("-host-group %q: %w", text, err)
		}
	}
	return nil
}

func parseGroup(text string) (machines, hosts string, enabled bool, err error) {
	enabled = true
	for _, pair := range strings.Split(text, ",") {
		key, value, _ := strings.Cut(pair, "=")
		switch key {
		case "vms":
			machines = value
		case "hosts":
			hosts = value
		case "enabled":
			enabled, err = strconv.ParseBool(value)
		default:
			err = fmt.Errorf("no such key")
		}
		if err != nil {
			return "", "", false, fmt.Errorf("-host-group %q: %s: %w", text, key, err)
		}
	}
	if machines == "" || hosts == "" {
		err = fmt.Errorf("-host-group %q: vms and hosts are needed", text)
	}
	return machines, hosts, enabled, err
}

// clearGroup takes all machines out of a VM group, as somebody may in the user interface.
func (w *world) clearGroup(name string) error {
	registry := w.service.Context.Map
	ctx := &simulator.Context{Context: context.Background(), Map: registry}
	cleared := false
	for _, entity := range registry.All("ClusterComputeResource") {
		cluster, ok := entity.(*simulator.ClusterComputeResource)
		if !ok {
			continue
		}
		ctx.WithLock(cluster, func() {
			config, ok := cluster.ConfigurationEx.(*types.ClusterConfigInfoEx)
			if !ok {
				return
			}
			for _, group := range config.Group {
				if vms, ok := group.(*types.ClusterVmGroup); ok && vms.Name == name {
					vms.Vm = nil
					cleared = true
				}
			}
		})
	}
	if !cleared {
		return fmt.Errorf("there is no VM group %q", name)
	}
	return nil
}
