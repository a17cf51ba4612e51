package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/vmware/govmomi"
	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/vapi/library"
	"github.com/vmware/govmomi/vapi/rest"
	"github.com/vmware/govmomi/vapi/vcenter"
)

// libraryItems is where vCenter tells the VM template of a library item; the simulator's own answer is empty.
const libraryItems = "/rest/vcenter/vm-template/library-items/"

// makeLibraries makes content libraries with one item each: a VM template that is a copy of a template.
func (w *world) makeLibraries(ctx context.Context, server *url.URL, specs listFlag) error {
	if len(specs) == 0 {
		return nil
	}
	client, err := govmomi.NewClient(ctx, server, true)
	if err != nil {
		return err
	}
	session := rest.NewClient(client.Client)
	if err := session.Login(ctx, server.User); err != nil {
		return err
	}
	finder := find.NewFinder(client.Client, false)
	datacenter, err := finder.Datacenter(ctx, "DC0")
	if err != nil {
		return err
	}
	finder.SetDatacenter(datacenter)
	for _, text := range specs {
		if err := w.makeLibrary(ctx, finder, session, text); err != nil {
			return fmt.Errorf("-library %q: %w", text, err)
		}
	}
	return session.Logout(ctx)
}

func (w *world) makeLibrary(ctx context.Context, finder *find.Finder, session *rest.Client, text string) error {
	fields := map[string]string{}
	for _, pair := range strings.Split(text, ",") {
		key, value, _ := strings.Cut(pair, "=")
		fields[key] = value
	}
	source, err := finder.VirtualMachine(ctx, fields["template"])
	if err != nil {
		return err
	}
	store, err := finder.Datastore(ctx, "LocalDS_0")
	if err != nil {
		return err
	}
	folder, err := finder.Folder(ctx, "/DC0/vm")
	if err != nil {
		return err
	}
	pool, err := finder.ResourcePool(ctx, "/DC0/host/DC0_C0/Resources")
	if err != nil {
		return err
	}
	backing := library.StorageBacking{DatastoreID: store.Reference().Value, Type: "DATASTORE"}
	id, err := library.NewManager(session).CreateLibrary(ctx, library.Library{
		Name: fields["name"], Type: "LOCAL", Storage: []library.StorageBacking{backing},
	})
	if err != nil {
		return err
	}
	item, err := vcenter.NewManager(session).CreateTemplate(ctx, vcenter.Template{
		Name: fields["item"], Library: id, SourceVM: source.Reference().Value,
		Placement: &vcenter.Placement{Folder: folder.Reference().Value, ResourcePool: pool.Reference().Value},
	})
	if err != nil {
		return err
	}
	made, err := finder.VirtualMachine(ctx, "/DC0/vm/"+fields["item"])
	if err != nil {
		return err
	}
	w.library[item] = made.Reference().Value
	return nil
}

// libraryTemplate answers with the VM template of a library item.
func (w *world) libraryTemplate(out http.ResponseWriter, r *http.Request) bool {
	id, found := strings.CutPrefix(r.URL.Path, libraryItems)
	template, known := w.library[id]
	if !found || !known || r.Method != http.MethodGet {
		return false
	}
	_ = json.NewEncoder(out).Encode(map[string]any{"value": map[string]string{"vm_template": template}})
	return true
}
