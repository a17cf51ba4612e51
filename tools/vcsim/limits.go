package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/types"
)

// overLimit gives the failure that a real vCenter has for a disk at a unit that its controller does not have.
func (w *world) overLimit(ctx *simulator.Context, method *simulator.Method) *rule {
	vm, ok := ctx.Map.Get(method.This).(*simulator.VirtualMachine)
	if !ok {
		return nil
	}
	var changes []types.BaseVirtualDeviceConfigSpec
	switch req := method.Body.(type) {
	case *types.CloneVM_Task:
		changes = req.Spec.Location.DeviceChange
		if req.Spec.Config != nil {
			changes = append(append(changes[:0:0], changes...), req.Spec.Config.DeviceChange...)
		}
	case *types.ReconfigVM_Task:
		changes = req.Spec.DeviceChange
	default:
		return nil
	}
	controllers := map[int32]types.BaseVirtualDevice{}
	for _, device := range vm.Config.Hardware.Device {
		controllers[device.GetVirtualDevice().Key] = device
	}
	for _, change := range changes {
		device := change.GetVirtualDeviceConfigSpec().Device
		controllers[device.GetVirtualDevice().Key] = device
	}
	hw, _ := strconv.Atoi(strings.TrimPrefix(vm.Config.Version, "vmx-"))
	for i, change := range changes {
		spec := change.GetVirtualDeviceConfigSpec()
		disk, ok := spec.Device.(*types.VirtualDisk)
		if !ok || spec.Operation != types.VirtualDeviceConfigSpecOperationAdd || disk.UnitNumber == nil {
			continue
		}
		units, own := unitsOf(controllers[disk.ControllerKey], hw)
		if *disk.UnitNumber < units && *disk.UnitNumber != own && *disk.UnitNumber >= 0 {
			continue
		}
		return &rule{Fault: "InvalidDeviceSpec", Message: fmt.Sprintf("Invalid configuration for device '%d'.", i)}
	}
	return nil
}

func unitsOf(controller types.BaseVirtualDevice, hw int) (units, own int32) {
	switch controller.(type) {
	case *types.ParaVirtualSCSIController:
		if hw >= 14 {
			return 65, 7 // 64 disks beside the controller's own unit
		}
		return 16, 7
	case types.BaseVirtualSCSIController:
		return 16, 7
	case types.BaseVirtualSATAController:
		return 30, -1
	case *types.VirtualNVMEController:
		if hw >= 21 {
			return 64, -1
		}
		return 15, -1
	case *types.VirtualIDEController:
		return 2, -1
	}
	return 0, -1
}
