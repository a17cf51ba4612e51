package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/object"
)

// find returns the references of all objects that govmomi's finder finds in the first datacenter.
func (w *world) find(ctx context.Context, kind, path string) ([]string, error) {
	finder, err := w.finder(ctx)
	if err != nil {
		return nil, err
	}
	switch kind {
	case "vm":
		return references(finder.VirtualMachineList(ctx, path))
	case "folder":
		return references(finder.FolderList(ctx, path))
	case "datastore":
		return references(finder.DatastoreList(ctx, path))
	case "network":
		return references(finder.NetworkList(ctx, path))
	case "pool":
		return references(finder.ResourcePoolList(ctx, path))
	case "cluster":
		return references(finder.ClusterComputeResourceList(ctx, path))
	case "datacenter":
		return references(finder.DatacenterList(ctx, path))
	}
	return nil, fmt.Errorf("kind %q is unknown", kind)
}

func references[T object.Reference](found []T, err error) ([]string, error) {
	all := []string{}
	var missing *find.NotFoundError
	if err != nil && !errors.As(err, &missing) {
		return nil, err
	}
	for _, one := range found {
		all = append(all, one.Reference().String())
	}
	return all, nil
}
