package main

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	pbmmethods "github.com/vmware/govmomi/pbm/methods"
	pbmsim "github.com/vmware/govmomi/pbm/simulator"
	pbm "github.com/vmware/govmomi/pbm/types"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// policyInClone is vCenter's refusal of a storage policy in a clone.
const policyInClone = "Changing or applying VM Storage Policies with Data Service capabilities during clone operations is " +
	"disallowed."

// policies of the simulator: a clone with a policy fails as it does on a vCenter whose policies have data services, and the
// policies of a reconfiguration can be read back.
func (w *world) policies(method *simulator.Method) *rule {
	switch req := method.Body.(type) {
	case *types.CloneVM_Task:
		profiles := len(req.Spec.Location.Profile)
		for _, disk := range req.Spec.Location.Disk {
			profiles += len(disk.Profile)
		}
		changes := req.Spec.Location.DeviceChange
		if req.Spec.Config != nil {
			profiles += len(req.Spec.Config.VmProfile)
			changes = slices.Concat(changes, req.Spec.Config.DeviceChange)
		}
		for _, change := range changes {
			profiles += len(change.GetVirtualDeviceConfigSpec().Profile)
		}
		if profiles > 0 {
			return &rule{Fault: "InvalidArgument", Message: policyInClone}
		}
	case *types.ReconfigVM_Task:
		vm := method.This.Value
		w.assign(vm, req.Spec.VmProfile)
		for _, change := range req.Spec.DeviceChange {
			spec := change.GetVirtualDeviceConfigSpec()
			w.assign(vm+":"+strconv.Itoa(int(spec.Device.GetVirtualDevice().Key)), spec.Profile)
		}
	}
	return nil
}

func (w *world) assign(key string, profiles []types.BaseVirtualMachineProfileSpec) {
	w.Lock()
	defer w.Unlock()
	for _, profile := range profiles {
		if defined, ok := profile.(*types.VirtualMachineDefinedProfileSpec); ok {
			w.assigned[key] = defined.ProfileId
		}
	}
}

// profileManager is the simulator's own, which knows of no associations.
type profileManager struct {
	*pbmsim.ProfileManager
	world *world
}

// registerPolicies replaces the simulator's profile manager.
func (w *world) registerPolicies() error {
	registry := pbmsim.New()
	for _, object := range registry.AllReference("") {
		if own, ok := object.(*pbmsim.ProfileManager); ok {
			registry.Put(&profileManager{ProfileManager: own, world: w})
			w.service.RegisterSDK(registry)
			return nil
		}
	}
	return errors.New("the simulator has no profile manager")
}

func (m *profileManager) PbmQueryAssociatedProfiles(req *pbm.PbmQueryAssociatedProfiles) soap.HasFault {
	body := &pbmmethods.PbmQueryAssociatedProfilesBody{Res: &pbm.PbmQueryAssociatedProfilesResponse{}}
	m.world.Lock()
	defer m.world.Unlock()
	for _, entity := range req.Entities {
		result := pbm.PbmQueryProfileResult{Object: entity}
		if id, ok := m.world.assigned[strings.TrimSpace(entity.Key)]; ok {
			result.ProfileId = []pbm.PbmProfileId{{UniqueId: id}}
		}
		body.Res.Returnval = append(body.Res.Returnval, result)
	}
	return body
}
