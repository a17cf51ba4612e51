package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/types"
)

// finder finds in the first datacenter.
func (w *world) finder(ctx context.Context) (*find.Finder, error) {
	client, err := vim25.NewClient(ctx, w.service)
	if err != nil {
		return nil, err
	}
	finder := find.NewFinder(client, true)
	datacenters, err := finder.DatacenterList(ctx, "*")
	if err != nil {
		return nil, err
	}
	return finder.SetDatacenter(datacenters[0]), nil
}

// makeFolders makes the folders of a path, such as one/two, below the folder of machines.
func (w *world) makeFolders(ctx context.Context, path string) error {
	finder, err := w.finder(ctx)
	if err != nil {
		return err
	}
	at := "/DC0/vm"
	folder, err := finder.Folder(ctx, at)
	if err != nil {
		return err
	}
	for _, name := range strings.Split(path, "/") {
		at += "/" + name
		if existing, err := finder.Folder(ctx, at); err == nil {
			folder = existing
		} else if folder, err = folder.CreateFolder(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// makePortgroup makes a distributed port group of an NSX segment. Several may have the same name if it starts with "NSX-".
func (w *world) makePortgroup(ctx context.Context, name, segment string) error {
	finder, err := w.finder(ctx)
	if err != nil {
		return err
	}
	found, err := finder.Network(ctx, "/DC0/network/DVS0")
	if err != nil {
		return err
	}
	dvs, ok := found.(*object.DistributedVirtualSwitch)
	if !ok {
		return fmt.Errorf("%s is no switch", found.Reference())
	}
	spec := types.DVPortgroupConfigSpec{Name: name, NumPorts: 1, Type: "earlyBinding", SegmentId: segment}
	task, err := dvs.AddPortgroup(ctx, []types.DVPortgroupConfigSpec{spec})
	if err != nil {
		return err
	}
	return task.Wait(ctx)
}
