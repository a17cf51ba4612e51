package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// setAccessible takes the configuration of a machine away, as vCenter does while it cannot read its files, or gives it back.
func (w *world) setAccessible(name string, accessible bool) error {
	ctx, vm := w.machine(name)
	if vm == nil {
		return fmt.Errorf("there is no machine %q", name)
	}
	w.Lock()
	defer w.Unlock()
	ctx.WithLock(vm, func() {
		config, hidden := w.hidden[vm.Self]
		switch {
		case !accessible && !hidden:
			w.hidden[vm.Self] = vm.Config
			vm.Config = nil
			vm.Runtime.ConnectionState = types.VirtualMachineConnectionStateInaccessible
		case accessible && hidden:
			delete(w.hidden, vm.Self)
			vm.Config = config
			vm.Runtime.ConnectionState = types.VirtualMachineConnectionStateConnected
		}
	})
	return nil
}

// machine finds a machine by its name.
func (w *world) machine(name string) (*simulator.Context, *simulator.VirtualMachine) {
	registry := w.service.Context.Map
	ctx := &simulator.Context{Context: context.Background(), Map: registry}
	for _, entity := range registry.All("VirtualMachine") {
		if vm, ok := entity.(*simulator.VirtualMachine); ok && vm.Name == name {
			return ctx, vm
		}
	}
	return ctx, nil
}

// refuseHidden is vCenter's refusal to work on a machine whose files it cannot read.
func (w *world) refuseHidden(method *simulator.Method) *rule {
	w.Lock()
	defer w.Unlock()
	if _, hidden := w.hidden[method.This]; hidden && strings.HasSuffix(method.Name, "_Task") {
		return &rule{Fault: "InvalidState", Message: "The operation is not allowed in the current state."}
	}
	return nil
}

// search stands in for the search index while a machine has no configuration, which the simulator's own does not expect.
type search struct{ ref types.ManagedObjectReference }

func (s *search) Reference() types.ManagedObjectReference { return s.ref }

func (w *world) searchIndex(method *simulator.Method) mo.Reference {
	w.Lock()
	defer w.Unlock()
	if method.Name != "FindByUuid" || len(w.hidden) == 0 {
		return nil
	}
	stand := &search{ref: method.This}
	method.This.Value = "search-" + method.This.Value
	return stand
}

func (s *search) FindByUuid(ctx *simulator.Context, req *types.FindByUuid) soap.HasFault {
	body := &methods.FindByUuidBody{Res: new(types.FindByUuidResponse)}
	for _, entity := range ctx.Map.All("VirtualMachine") {
		vm, ok := entity.(*simulator.VirtualMachine)
		if !ok || vm.Config == nil {
			continue
		}
		uuid := vm.Config.Uuid
		if req.InstanceUuid != nil && *req.InstanceUuid {
			uuid = vm.Config.InstanceUuid
		}
		if uuid == req.Uuid {
			ref := vm.Self
			body.Res.Returnval = &ref
		}
	}
	return body
}

// setDatastore changes how much room a datastore has, and its mode of maintenance.
func (w *world) setDatastore(name string, freeGiB int64, maintenance string) error {
	registry := w.service.Context.Map
	ctx := &simulator.Context{Context: context.Background(), Map: registry}
	for _, entity := range registry.All("Datastore") {
		store, ok := entity.(*simulator.Datastore)
		if !ok || store.Name != name {
			continue
		}
		ctx.WithLock(store, func() {
			store.Summary.FreeSpace = freeGiB << 30
			if maintenance != "" {
				store.Summary.MaintenanceMode = maintenance
			}
		})
		return nil
	}
	return fmt.Errorf("there is no datastore %q", name)
}

// sessions lists the SOAP sessions that are logged in.
func (w *world) sessions(ctx context.Context) (*vim25.Client, []types.UserSession, error) {
	client, err := vim25.NewClient(ctx, w.service)
	if err != nil {
		return nil, nil, err
	}
	var manager mo.SessionManager
	collector, reference := client.ServiceContent.PropertyCollector, *client.ServiceContent.SessionManager
	if err := mo.RetrieveProperties(ctx, client, collector, reference, &manager); err != nil {
		return nil, nil, err
	}
	return client, manager.SessionList, nil
}

// outOfSessions tells whether a login is one too many, which vCenter answers with 503 for SOAP and for REST.
func (w *world) outOfSessions(name string, r *http.Request) bool {
	w.Lock()
	limit, rest := w.maxSessions, len(w.rest)-len(w.restGone)
	w.Unlock()
	switch {
	case limit <= 0:
		return false
	case name == "Login":
		_, sessions, err := w.sessions(r.Context())
		return err == nil && len(sessions) >= limit
	case r.Method == http.MethodPost && (r.URL.Path == "/rest/com/vmware/cis/session" || r.URL.Path == "/api/session"):
		return r.URL.RawQuery == "" && rest >= limit
	}
	return false
}

// fillPod moves all datastores but the first one into the first datastore cluster, if there is one.
func (w *world) fillPod(ctx context.Context) error {
	client, err := vim25.NewClient(ctx, w.service)
	if err != nil {
		return err
	}
	finder := find.NewFinder(client, false)
	pods, err := finder.DatastoreClusterList(ctx, "/DC0/datastore/*")
	var missing *find.NotFoundError
	if errors.As(err, &missing) {
		return nil
	}
	if err != nil {
		return err
	}
	stores, err := finder.DatastoreList(ctx, "/DC0/datastore/*")
	if err != nil {
		return err
	}
	var moved []types.ManagedObjectReference
	for _, store := range stores[1:] {
		moved = append(moved, store.Reference())
	}
	task, err := pods[0].MoveInto(ctx, moved)
	if err != nil {
		return err
	}
	return task.Wait(ctx)
}
