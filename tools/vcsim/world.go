package main

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// rule says what is to happen to some calls of one method.
type rule struct {
	// Method is the vim25 method's name, or "GET /rest/…" for REST; "*" is any.
	Method string `json:"method"`
	// Kind: fault (the call fails), task (its task fails), drop-devices (it succeeds without its device changes),
	// status (an HTTP status), close (the connection is cut), lose-answer (done, but the answer is lost).
	Kind string `json:"kind"`
	// Nth is the first call that is hit, from 1; Times how many calls are hit from there, 0 for all.
	Nth   int `json:"nth"`
	Times int `json:"times"`
	// Name limits a rule on CloneVM_Task to clones of that name.
	Name string `json:"name"`
	// Fault is a vim25 fault type; Message goes with it word for word.
	Fault   string `json:"fault"`
	Message string `json:"message"`
	Status  int    `json:"status"`
	// DelayMs is how long a task runs before it fails.
	DelayMs int `json:"delayMs"`

	seen int
}

func (r *rule) hits() bool {
	r.seen++
	first := max(r.Nth, 1)
	return r.seen >= first && (r.Times == 0 || r.seen < first+r.Times)
}

// world is the simulator and everything that we add to it.
type world struct {
	sync.Mutex
	service  *simulator.Service
	options  options
	delays   map[string]int
	counts   map[string]int
	rules    []*rule
	rest     map[string]bool // REST session ids seen; false once dropped
	guests   int
	restGone map[string]bool
	assigned map[string]string   // storage policies, by machine or by machine:disk
	moves    map[string][]string // how the disks of each clone were asked to be moved: as a whole, then one by one

	// hidden are the configurations of machines that cannot be read at the moment.
	hidden      map[types.ManagedObjectReference]*types.VirtualMachineConfigInfo
	maxSessions int               // 0 for any number
	library     map[string]string // library items: their VM templates
	peak        int               // clones that were under way at once
}

func newWorld(service *simulator.Service, delays map[string]int, o options) *world {
	return &world{
		service: service, options: o, delays: delays,
		counts: map[string]int{}, rest: map[string]bool{}, restGone: map[string]bool{}, moves: map[string][]string{},
		assigned: map[string]string{}, hidden: map[types.ManagedObjectReference]*types.VirtualMachineConfigInfo{},
		library: map[string]string{},
	}
}

func (w *world) count(name string) {
	w.Lock()
	defer w.Unlock()
	w.counts[name]++
}

func (w *world) delay(name string) int {
	w.Lock()
	defer w.Unlock()
	return w.delays[name]
}

func (w *world) restSession(id string) bool {
	w.Lock()
	defer w.Unlock()
	if w.restGone[id] {
		return false
	}
	w.rest[id] = true
	return true
}

// next gives the first rule of the given kinds that hits this call.
func (w *world) next(method string, kinds ...string) *rule {
	return w.nextNamed(method, "", kinds...)
}

func (w *world) nextNamed(method, name string, kinds ...string) *rule {
	w.Lock()
	defer w.Unlock()
	for _, r := range w.rules {
		if r.Method != method && r.Method != "*" || r.Name != "" && r.Name != name {
			continue
		}
		for _, kind := range kinds {
			if r.Kind == kind && r.hits() {
				return r
			}
		}
	}
	return nil
}

// intercept sees every SOAP call before the simulator does.
func (w *world) intercept(ctx *simulator.Context, method *simulator.Method) (mo.Reference, types.BaseMethodFault) {
	name := ""
	if clone, ok := method.Body.(*types.CloneVM_Task); ok {
		name = clone.Name
		w.noteMoves(clone)
		w.notePeak(ctx)
	}
	if r := w.nextNamed(method.Name, name, "fault", "task", "drop-devices"); r != nil {
		switch r.Kind {
		case "fault":
			w.service.AddFaultRule(&simulator.FaultInjectionRule{
				MethodName: method.Name, ObjectType: "*", ObjectName: "*", Probability: 1, MaxCount: 1, Enabled: true,
				FaultType: simulator.FaultTypeCustom, Fault: makeFault(r.Fault), Message: r.Message,
			})
		case "task":
			return failNext(method, r), nil
		default:
			dropDevices(method.Body)
		}
	}
	if w.options.dropDevices && method.Name == "CloneVM_Task" {
		dropDevices(method.Body)
	}
	if index := w.searchIndex(method); index != nil {
		return index, nil
	}
	if r := w.refuseHidden(method); r != nil {
		return failNext(method, r), nil
	}
	if r := w.policies(method); r != nil {
		return failNext(method, r), nil
	}
	if w.options.unitLimits {
		if r := w.overLimit(ctx, method); r != nil {
			return failNext(method, r), nil
		}
	}
	if method.Name == "PowerOnVM_Task" && w.options.guestIPDelay >= 0 {
		go w.giveAddresses(method.This)
	}
	return nil, nil
}

// noteMoves keeps what the simulator passes over: whether each disk becomes a delta or a copy.
func (w *world) noteMoves(clone *types.CloneVM_Task) {
	moves := []string{clone.Spec.Location.DiskMoveType}
	for _, disk := range clone.Spec.Location.Disk {
		moves = append(moves, disk.DiskMoveType)
	}
	w.Lock()
	defer w.Unlock()
	w.moves[clone.Name] = moves
}

// notePeak counts the clones that are under way, with the one that starts now.
func (w *world) notePeak(ctx *simulator.Context) {
	running := 1
	instance := ctx.Map.Get(vim25.ServiceInstance).(*simulator.ServiceInstance)
	manager := ctx.Map.Get(*instance.Content.TaskManager).(*simulator.TaskManager)
	for _, ref := range manager.RecentTask {
		task, ok := ctx.Map.Get(ref).(*simulator.Task)
		if ok && strings.Contains(strings.ToLower(task.Info.DescriptionId), "clone") && task.Info.CompleteTime == nil {
			running++
		}
	}
	w.Lock()
	defer w.Unlock()
	w.peak = max(w.peak, running)
}

func dropDevices(body any) {
	switch req := body.(type) {
	case *types.CloneVM_Task:
		req.Spec.Location.DeviceChange = nil
		if req.Spec.Config != nil {
			req.Spec.Config.DeviceChange = nil
		}
	case *types.ReconfigVM_Task:
		req.Spec.DeviceChange = nil
	}
}

func makeFault(name string) types.BaseMethodFault {
	if name == "" {
		name = "SystemError"
	}
	if kind, ok := types.TypeFunc()(name); ok {
		if fault, ok := reflect.New(kind).Interface().(types.BaseMethodFault); ok {
			return fault
		}
	}
	return &types.SystemError{Reason: fmt.Sprintf("no fault type %s", name)}
}

// failing stands in for an object whose next task fails.
type failing struct {
	ref  types.ManagedObjectReference
	rule *rule
}

// failNext puts a stand-in in the object's place for this one call. The simulator would look the object up again by its
// reference, so the call gets one that nobody has.
func failNext(method *simulator.Method, r *rule) mo.Reference {
	stand := &failing{ref: method.This, rule: r}
	method.This.Value = "failing-" + method.This.Value
	return stand
}

func (f *failing) Reference() types.ManagedObjectReference { return f.ref }

func (f *failing) task(ctx *simulator.Context, name string) types.ManagedObjectReference {
	task := simulator.CreateTask(f.ref, name, nil)
	task.Info.State = types.TaskInfoStateRunning
	ctx.Map.Put(task)
	task.Info.Key, task.Info.Task = task.Self.Value, task.Self
	go func() {
		time.Sleep(time.Duration(f.rule.DelayMs) * time.Millisecond)
		ctx.Map.AtomicUpdate(ctx, task, []types.PropertyChange{
			{Name: "info.completeTime", Val: time.Now()},
			{Name: "info.state", Val: types.TaskInfoStateError},
			{Name: "info.error", Val: types.LocalizedMethodFault{Fault: makeFault(f.rule.Fault), LocalizedMessage: f.rule.Message}},
		})
	}()
	return task.Self
}

func (f *failing) CloneVMTask(ctx *simulator.Context, _ *types.CloneVM_Task) soap.HasFault {
	return &methods.CloneVM_TaskBody{Res: &types.CloneVM_TaskResponse{Returnval: f.task(ctx, "cloneVm")}}
}

func (f *failing) ReconfigVMTask(ctx *simulator.Context, _ *types.ReconfigVM_Task) soap.HasFault {
	return &methods.ReconfigVM_TaskBody{Res: &types.ReconfigVM_TaskResponse{Returnval: f.task(ctx, "reconfigVm")}}
}

func (f *failing) PowerOnVMTask(ctx *simulator.Context, _ *types.PowerOnVM_Task) soap.HasFault {
	return &methods.PowerOnVM_TaskBody{Res: &types.PowerOnVM_TaskResponse{Returnval: f.task(ctx, "powerOn")}}
}

func (f *failing) PowerOffVMTask(ctx *simulator.Context, _ *types.PowerOffVM_Task) soap.HasFault {
	return &methods.PowerOffVM_TaskBody{Res: &types.PowerOffVM_TaskResponse{Returnval: f.task(ctx, "powerOff")}}
}

func (f *failing) DestroyTask(ctx *simulator.Context, _ *types.Destroy_Task) soap.HasFault {
	return &methods.Destroy_TaskBody{Res: &types.Destroy_TaskResponse{Returnval: f.task(ctx, "destroy")}}
}

func (f *failing) UpgradeVMTask(ctx *simulator.Context, _ *types.UpgradeVM_Task) soap.HasFault {
	return &methods.UpgradeVM_TaskBody{Res: &types.UpgradeVM_TaskResponse{Returnval: f.task(ctx, "upgradeVm")}}
}

// giveAddresses waits until the machine runs and then fills in what VMware Tools would report.
func (w *world) giveAddresses(ref types.ManagedObjectReference) {
	registry := w.service.Context.Map
	ctx := &simulator.Context{Context: context.Background(), Map: registry}
	vm, ok := registry.Get(ref).(*simulator.VirtualMachine)
	if !ok {
		return
	}
	running := false
	for range 3000 {
		ctx.WithLock(vm, func() { running = vm.Runtime.PowerState == types.VirtualMachinePowerStatePoweredOn })
		if running {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if !running {
		return
	}
	time.Sleep(time.Duration(w.options.guestIPDelay) * time.Millisecond)
	w.Lock()
	w.guests++
	n := w.guests
	w.Unlock()
	ctx.WithLock(vm, func() {
		if vm.Runtime.PowerState != types.VirtualMachinePowerStatePoweredOn || vm.Guest == nil {
			return
		}
		nics := guestNics(vm.Guest.Net, n)
		address := fmt.Sprintf("10.16.%d.%d", n/250, 1+n%250)
		ctx.Update(vm, []types.PropertyChange{
			{Name: "guest.toolsRunningStatus", Val: string(types.VirtualMachineToolsRunningStatusGuestToolsRunning)},
			{Name: "guest.hostName", Val: strings.ToLower(vm.Name)},
			{Name: "guest.net", Val: nics},
			{Name: "guest.ipAddress", Val: address},
			{Name: "summary.guest.ipAddress", Val: address},
		})
	})
}

// guestNics are the interfaces of the nth guest. Each card is a port of a bridge that has its MAC address and the address that others
// reach, as with Open vSwitch: the card itself has an address of its link at most.
func guestNics(cards []types.GuestNicInfo, n int) []types.GuestNicInfo {
	var nics []types.GuestNicInfo
	seen := map[string]bool{}
	for _, card := range cards {
		if seen[card.MacAddress] {
			continue
		}
		i := len(seen)
		seen[card.MacAddress] = true
		bridge := card
		card.Connected, bridge.Connected = true, true
		card.IpAddress = []string{fmt.Sprintf("fe80::%x:%x", i+1, n)}
		bridge.IpAddress = []string{fmt.Sprintf("10.%d.%d.%d", 16+i, n/250, 1+n%250)}
		nics = append(nics, card, bridge)
	}
	return nics
}

// makeVolume turns a machine's disk into a first class disk.
func (w *world) makeVolume(name string, unit int32) error {
	made := false
	ctx, vm := w.machine(name)
	if vm == nil {
		return fmt.Errorf("there is no machine %q", name)
	}
	ctx.WithLock(vm, func() {
		for _, device := range vm.Config.Hardware.Device {
			if disk, ok := device.(*types.VirtualDisk); ok && disk.UnitNumber != nil && *disk.UnitNumber == unit {
				disk.VDiskId = &types.ID{Id: fmt.Sprintf("fcd-%s-%d", name, unit)}
				made = true
			}
		}
	})
	if !made {
		return fmt.Errorf("machine %q has no disk at unit %d", name, unit)
	}
	return nil
}

// dropSessions ends every session, SOAP and REST, as a restarted vCenter does.
func (w *world) dropSessions(ctx context.Context) (int, error) {
	client, sessions, err := w.sessions(ctx)
	if err != nil {
		return 0, err
	}
	dropped := 0
	for _, session := range sessions {
		req := types.TerminateSession{This: *client.ServiceContent.SessionManager, SessionId: []string{session.Key}}
		if _, err := methods.TerminateSession(ctx, client, &req); err == nil {
			dropped++
		}
	}
	w.Lock()
	defer w.Unlock()
	for id := range w.rest {
		w.restGone[id] = true
	}
	return dropped, nil
}
