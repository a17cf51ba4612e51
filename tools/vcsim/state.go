package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/types"
)

// saveEvery is how often machines are looked at for changes worth saving.
const saveEvery = 500 * time.Millisecond

// saved is what outlives the simulator of one machine. Datacenters, hosts, pools and templates are made anew from the same
// flags and get the same references, so that machines can be put back where they were.
type saved struct {
	Folder  types.ManagedObjectReference   `json:"folder"`
	Pool    types.ManagedObjectReference   `json:"pool"`
	Host    types.ManagedObjectReference   `json:"host"`
	Config  types.VirtualMachineConfigInfo `json:"config"`
	Guest   types.GuestInfo                `json:"guest"`
	Running bool                           `json:"running"`
}

type savedState struct {
	Guests   int     `json:"guests"`
	Machines []saved `json:"machines"`
}

// keepState saves the machines into the folder whenever they have changed, until done; once more then.
func (w *world) keepState(dir string, done <-chan struct{}) error {
	file := filepath.Join(dir, "machines.json")
	var last []byte
	for ended := false; ; {
		text, err := w.encodeState()
		if err == nil && !bytes.Equal(text, last) {
			if err = os.WriteFile(file+".new", text, 0o600); err == nil {
				err = os.Rename(file+".new", file)
			}
			last = text
		}
		if err != nil {
			return err
		}
		if ended {
			return nil
		}
		select {
		case <-done:
			ended = true
		case <-time.After(saveEvery):
		}
	}
}

func (w *world) encodeState() ([]byte, error) {
	registry := w.service.Context.Map
	ctx := &simulator.Context{Context: context.Background(), Map: registry}
	w.Lock()
	state := savedState{Guests: w.guests}
	w.Unlock()
	var text bytes.Buffer
	for _, entity := range registry.All("VirtualMachine") {
		vm, ok := entity.(*simulator.VirtualMachine)
		if !ok {
			continue
		}
		ctx.WithLock(vm, func() {
			if vm.Config == nil || vm.Config.Template || vm.ResourcePool == nil || vm.Runtime.Host == nil || vm.Parent == nil {
				return
			}
			one := saved{Folder: *vm.Parent, Pool: *vm.ResourcePool, Host: *vm.Runtime.Host, Config: *vm.Config}
			if vm.Guest != nil {
				one.Guest = *vm.Guest
			}
			one.Running = vm.Runtime.PowerState == types.VirtualMachinePowerStatePoweredOn
			state.Machines = append(state.Machines, one)
		})
	}
	err := types.NewJSONEncoder(&text).Encode(state)
	return text.Bytes(), err
}

// restoreState makes the machines again that an earlier simulator saved into the folder.
func (w *world) restoreState(ctx context.Context, dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "machines.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var state savedState
	if err := types.NewJSONDecoder(bytes.NewReader(text)).Decode(&state); err != nil {
		return fmt.Errorf("machines.json: %w", err)
	}
	w.guests = state.Guests
	client, err := vim25.NewClient(ctx, w.service)
	if err != nil {
		return err
	}
	for _, one := range state.Machines {
		if err := w.restore(ctx, client, one); err != nil {
			return fmt.Errorf("machine %s: %w", one.Config.Name, err)
		}
	}
	return nil
}

func (w *world) restore(ctx context.Context, client *vim25.Client, one saved) error {
	var path object.DatastorePath
	path.FromString(one.Config.Files.VmPathName)
	spec := types.VirtualMachineConfigSpec{
		Name: one.Config.Name, GuestId: one.Config.GuestId, Uuid: one.Config.Uuid, InstanceUuid: one.Config.InstanceUuid,
		NumCPUs: one.Config.Hardware.NumCPU, MemoryMB: int64(one.Config.Hardware.MemoryMB), Version: one.Config.Version,
		Files: &types.VirtualMachineFileInfo{VmPathName: fmt.Sprintf("[%s]", path.Datastore)},
	}
	host := object.NewHostSystem(client, one.Host)
	task, err := object.NewFolder(client, one.Folder).CreateVM(ctx, spec, object.NewResourcePool(client, one.Pool), host)
	if err != nil {
		return err
	}
	info, err := task.WaitForResult(ctx, nil)
	if err != nil {
		return err
	}
	ref := info.Result.(types.ManagedObjectReference)
	vm, ok := w.service.Context.Map.Get(ref).(*simulator.VirtualMachine)
	if !ok {
		return fmt.Errorf("not made")
	}
	if one.Running {
		on, err := object.NewVirtualMachine(client, ref).PowerOn(ctx)
		if err != nil {
			return err
		}
		if err := on.Wait(ctx); err != nil {
			return err
		}
	}
	inner := &simulator.Context{Context: ctx, Map: w.service.Context.Map}
	inner.WithLock(vm, func() {
		// Everything as it was, devices with their keys and units above all; the files are this simulator's.
		files := vm.Config.Files
		*vm.Config = one.Config
		vm.Config.Files = files
		*vm.Guest = one.Guest
		vm.Summary.Guest.IpAddress = one.Guest.IpAddress
		vm.Summary.Config.Annotation = one.Config.Annotation
	})
	return nil
}

// certificate is the one of an earlier simulator in this folder, or a new one that is kept there.
func certificate(dir string) (tls.Certificate, error) {
	if dir == "" {
		return signed()
	}
	file := filepath.Join(dir, "certificate.pem")
	if kept, err := tls.LoadX509KeyPair(file, file); err == nil {
		return kept, nil
	}
	made, err := signed()
	if err != nil {
		return made, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(made.PrivateKey)
	if err != nil {
		return made, err
	}
	var text bytes.Buffer
	_ = pem.Encode(&text, &pem.Block{Type: "PRIVATE KEY", Bytes: key})
	for _, raw := range made.Certificate {
		_ = pem.Encode(&text, &pem.Block{Type: "CERTIFICATE", Bytes: raw})
	}
	return made, os.WriteFile(file, text.Bytes(), 0o600)
}
