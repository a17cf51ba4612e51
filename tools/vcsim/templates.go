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

// usual are the templates made when none is asked for: one for each controller type and limit.
var usual = listFlag{
	"name=pvscsi,controller=pvscsi,hw=vmx-19", "name=pvscsi-13,controller=pvscsi,hw=vmx-13", "name=lsi,controller=lsi,hw=vmx-19",
	"name=lsisas,controller=lsisas,hw=vmx-19", "name=sata,controller=sata,hw=vmx-19", "name=nvme,controller=nvme,hw=vmx-19",
	"name=nvme-21,controller=nvme,hw=vmx-21", "name=ide,controller=ide,hw=vmx-13", "name=two-disks,controller=pvscsi,hw=vmx-19,disks=2",
	"name=no-snapshot,controller=pvscsi,hw=vmx-19,snapshot=",
}

type template struct {
	name, controller, hw, snapshot string
	disks, gib                     int
	marked                         bool
}

func parseTemplate(text string) (template, error) {
	t := template{controller: "pvscsi", hw: "vmx-19", snapshot: "base", disks: 1, gib: 10, marked: true}
	for _, pair := range strings.Split(text, ",") {
		key, value, _ := strings.Cut(pair, "=")
		var err error
		switch key {
		case "name":
			t.name = value
		case "controller":
			t.controller = value
		case "hw":
			t.hw = value
		case "snapshot":
			t.snapshot = value
		case "disks":
			t.disks, err = strconv.Atoi(value)
		case "gib":
			t.gib, err = strconv.Atoi(value)
		case "marked":
			t.marked, err = strconv.ParseBool(value)
		default:
			err = fmt.Errorf("no such key")
		}
		if err != nil {
			return t, fmt.Errorf("-template %q: %s: %w", text, key, err)
		}
	}
	if t.name == "" {
		return t, fmt.Errorf("-template %q: name is missing", text)
	}
	return t, nil
}

func (w *world) makeTemplates(ctx context.Context, specs listFlag) error {
	if len(specs) == 0 {
		specs = usual
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
	for _, text := range specs {
		t, err := parseTemplate(text)
		if err != nil {
			return err
		}
		if err := w.makeTemplate(ctx, finder, t); err != nil {
			return fmt.Errorf("template %s: %w", t.name, err)
		}
	}
	return nil
}

func (w *world) makeTemplate(ctx context.Context, finder *find.Finder, t template) error {
	folder, err := finder.DefaultFolder(ctx)
	if err != nil {
		return err
	}
	pools, err := finder.ResourcePoolList(ctx, "*/Resources")
	if err != nil {
		return err
	}
	datastores, err := finder.DatastoreList(ctx, "*")
	if err != nil {
		return err
	}
	networks, err := finder.NetworkList(ctx, "*")
	if err != nil {
		return err
	}
	backing, err := networks[0].EthernetCardBackingInfo(ctx)
	if err != nil {
		return err
	}
	changes, err := t.devices(backing)
	if err != nil {
		return err
	}
	spec := types.VirtualMachineConfigSpec{
		Name: t.name, GuestId: "otherLinux64Guest", NumCPUs: 1, MemoryMB: 1024, Version: t.hw, DeviceChange: changes,
		Files: &types.VirtualMachineFileInfo{VmPathName: fmt.Sprintf("[%s]", datastores[0].Name())},
	}
	task, err := folder.CreateVM(ctx, spec, pools[0], nil)
	if err != nil {
		return err
	}
	info, err := task.WaitForResult(ctx, nil)
	if err != nil {
		return err
	}
	vm, ok := w.service.Context.Map.Get(info.Result.(types.ManagedObjectReference)).(*simulator.VirtualMachine)
	if !ok {
		return fmt.Errorf("not made")
	}
	return w.finish(ctx, finder, t, vm)
}

func (w *world) finish(ctx context.Context, finder *find.Finder, t template, made *simulator.VirtualMachine) error {
	vm, err := finder.VirtualMachine(ctx, t.name)
	if err != nil {
		return err
	}
	if t.snapshot != "" {
		task, err := vm.CreateSnapshot(ctx, t.snapshot, "", false, false)
		if err != nil {
			return err
		}
		if err := task.Wait(ctx); err != nil {
			return err
		}
	}
	if made.Config.Version != t.hw {
		made.Config.Version = t.hw
	}
	if t.marked {
		return vm.MarkAsTemplate(ctx)
	}
	return nil
}

// devices are the controller, its disks and one vmxnet3 card.
func (t template) devices(network types.BaseVirtualDeviceBackingInfo) ([]types.BaseVirtualDeviceConfigSpec, error) {
	const key = -100
	scsi := types.VirtualSCSIController{
		SharedBus:          types.VirtualSCSISharingNoSharing,
		ScsiCtlrUnitNumber: 7,
		VirtualController:  types.VirtualController{VirtualDevice: types.VirtualDevice{Key: key}},
	}
	var controller types.BaseVirtualDevice
	controllerKey := int32(key)
	switch t.controller {
	case "pvscsi":
		controller = &types.ParaVirtualSCSIController{VirtualSCSIController: scsi}
	case "lsi":
		controller = &types.VirtualLsiLogicController{VirtualSCSIController: scsi}
	case "lsisas":
		controller = &types.VirtualLsiLogicSASController{VirtualSCSIController: scsi}
	case "buslogic":
		controller = &types.VirtualBusLogicController{VirtualSCSIController: scsi}
	case "sata":
		controller = &types.VirtualAHCIController{VirtualSATAController: types.VirtualSATAController{VirtualController: scsi.VirtualController}}
	case "nvme":
		controller = &types.VirtualNVMEController{VirtualController: scsi.VirtualController}
	case "ide":
		controllerKey = 200 // every machine has two IDE controllers already
	default:
		return nil, fmt.Errorf("no controller type %q", t.controller)
	}
	var changes []types.BaseVirtualDeviceConfigSpec
	add := func(device types.BaseVirtualDevice, file types.VirtualDeviceConfigSpecFileOperation) {
		changes = append(changes, &types.VirtualDeviceConfigSpec{
			Operation: types.VirtualDeviceConfigSpecOperationAdd, FileOperation: file, Device: device,
		})
	}
	if controller != nil {
		add(controller, "")
	}
	for i := range t.disks {
		unit := int32(i)
		add(&types.VirtualDisk{
			VirtualDevice: types.VirtualDevice{
				Key: int32(-200 - i), ControllerKey: controllerKey, UnitNumber: &unit,
				Backing: &types.VirtualDiskFlatVer2BackingInfo{DiskMode: string(types.VirtualDiskModePersistent), ThinProvisioned: types.NewBool(true)},
			},
			CapacityInKB: int64(t.gib) * 1024 * 1024,
		}, types.VirtualDeviceConfigSpecFileOperationCreate)
	}
	add(&types.VirtualVmxnet3{VirtualVmxnet: types.VirtualVmxnet{VirtualEthernetCard: types.VirtualEthernetCard{
		VirtualDevice: types.VirtualDevice{Key: -300, Backing: network},
		AddressType:   string(types.VirtualEthernetCardMacTypeGenerated),
	}}}, "")
	return changes, nil
}
