// Command vcsim is govmomi's vCenter simulator with what tests and benchmarks of machines need on top: templates of every
// disk controller, guests that get addresses, clones that run side by side, counted calls, and faults on demand.
//
// It prints one JSON line on stdout when it is ready. With -exit-on-stdin-close it lives no longer than its parent.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/vmware/govmomi/simulator"

	_ "github.com/vmware/govmomi/pbm/simulator"
	_ "github.com/vmware/govmomi/vapi/cluster/simulator"
	_ "github.com/vmware/govmomi/vapi/simulator"
)

type options struct {
	listen, admin, username, password string
	methodDelay, version, state       string
	templates, groups, libraries      listFlag
	guestIPDelay                      int
	dropDevices, unitLimits, anyOrder bool
	exitOnStdinClose, quiet           bool
}

type listFlag []string

func (l *listFlag) String() string     { return strings.Join(*l, " ") }
func (l *listFlag) Set(v string) error { *l = append(*l, v); return nil }

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "vcsim:", err)
		os.Exit(1)
	}
}

func run() error {
	model := simulator.VPX()
	model.Host = 0
	var o options
	flag.StringVar(&o.listen, "l", "127.0.0.1:0", "listen address of the vCenter (TLS)")
	flag.StringVar(&o.admin, "admin", "127.0.0.1:0", "listen address of the admin endpoint (plain HTTP)")
	flag.StringVar(&o.username, "username", "user", "user name that may log in")
	flag.StringVar(&o.password, "password", "pass", "its password")
	flag.StringVar(&o.version, "api-version", "", "vim25 API version to report, such as 7.0.3.0")
	flag.IntVar(&model.Datacenter, "dc", 1, "datacenters")
	flag.IntVar(&model.Cluster, "cluster", 1, "clusters per datacenter")
	flag.IntVar(&model.ClusterHost, "host", 3, "hosts per cluster")
	flag.IntVar(&model.Host, "standalone-host", 0, "standalone hosts per datacenter")
	flag.IntVar(&model.Datastore, "ds", 1, "datastores per datacenter")
	flag.IntVar(&model.Machine, "vm", 0, "plain virtual machines per resource pool")
	flag.IntVar(&model.Pool, "pool", 0, "resource pools per cluster")
	flag.IntVar(&model.Portgroup, "pg", 1, "distributed port groups per datacenter")
	flag.IntVar(&model.OpaqueNetwork, "nsx", 0, "opaque networks per datacenter")
	flag.IntVar(&model.Pod, "pod", 0, "datastore clusters per datacenter; the first gets all datastores but the first one")
	flag.StringVar(&o.methodDelay, "method-delay", "", "method:milliseconds, separated by commas; a *_Task method delays its task, any other its answer")
	flag.Var(&o.templates, "template", "name=…[,controller=pvscsi|lsi|lsisas|buslogic|sata|nvme|ide][,hw=vmx-19][,disks=1][,gib=10][,snapshot=base][,marked=true]; may be given several times (default: one for each controller type)")
	flag.Var(&o.groups, "host-group", "vms=…,hosts=…[,enabled=true]: groups in the first compute cluster, the hosts' with its first host, and a rule between them; may be given several times")
	flag.Var(&o.libraries, "library", "name=…,item=…,template=…: a content library with a VM template, a copy of a template; may be given several times")
	flag.IntVar(&o.guestIPDelay, "guest-ip-delay", 0, "milliseconds after power-on at which a guest gets addresses; negative: never")
	flag.BoolVar(&o.dropDevices, "drop-device-changes", false, "clones succeed but drop their device changes, in silence")
	flag.BoolVar(&o.unitLimits, "unit-limits", false, "refuse unit numbers that the controller type does not have")
	flag.BoolVar(&o.anyOrder, "any-order", false, "take requests with their elements in any order; to check the order costs time")
	flag.StringVar(&o.state, "state", "", "folder in which the certificate and the machines outlive the simulator")
	flag.BoolVar(&o.exitOnStdinClose, "exit-on-stdin-close", false, "exit when stdin is closed")
	flag.BoolVar(&o.quiet, "quiet", true, "drop the simulator's own log")
	flag.Parse()
	if o.quiet {
		log.SetOutput(io.Discard)
	}

	delays, err := parseDelays(o.methodDelay)
	if err != nil {
		return err
	}
	taskDelays(delays)
	if o.version != "" {
		model.ServiceContent.About.ApiVersion = o.version
		model.ServiceContent.About.Version = o.version
	}
	// By this the client knows that updates are costly here.
	model.ServiceContent.About.FullName += " (govmomi simulator)"
	if err := model.Create(); err != nil {
		return err
	}
	defer model.Remove()
	service := model.Service
	service.RegisterEndpoints = true
	service.Listen = &url.URL{User: url.UserPassword(o.username, o.password), Host: "127.0.0.1:0"}
	inner := service.NewServer()
	defer inner.Close()

	world := newWorld(service, delays, o)
	if err := world.makeTemplates(context.Background(), o.templates); err != nil {
		return err
	}
	if err := world.fillPod(context.Background()); err != nil {
		return err
	}
	if err := world.makeGroups(context.Background(), o.groups); err != nil {
		return err
	}
	if o.state != "" {
		if err := world.restoreState(context.Background(), o.state); err != nil {
			return err
		}
	}
	if err := world.registerPolicies(); err != nil {
		return err
	}
	if err := world.makeLibraries(context.Background(), inner.URL, o.libraries); err != nil {
		return err
	}
	service.Context.Map.Handler = world.intercept

	front, err := listenFront(o.listen, world)
	if err != nil {
		return err
	}
	admin, err := world.serveAdmin(o.admin, front)
	if err != nil {
		return err
	}
	ready := map[string]string{
		"url": front.url(), "admin": admin, "username": o.username, "password": o.password,
		"sha1": front.sha1, "sha256": front.sha256, "ca": front.pem,
	}
	if err := json.NewEncoder(os.Stdout).Encode(ready); err != nil {
		return err
	}
	if o.state == "" {
		waitForEnd(o.exitOnStdinClose)
		return nil
	}
	done := make(chan struct{})
	go func() { waitForEnd(o.exitOnStdinClose); close(done) }()
	return world.keepState(o.state, done)
}

func waitForEnd(stdin bool) {
	done := make(chan os.Signal, 1)
	signal.Notify(done, os.Interrupt, syscall.SIGTERM)
	if stdin {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			done <- os.Interrupt
		}()
	}
	<-done
}

func parseDelays(list string) (map[string]int, error) {
	delays := map[string]int{}
	for _, entry := range strings.Split(list, ",") {
		if entry == "" {
			continue
		}
		name, ms, ok := strings.Cut(entry, ":")
		n, err := strconv.Atoi(ms)
		if !ok || err != nil {
			return nil, fmt.Errorf("-method-delay %q: want method:milliseconds", entry)
		}
		delays[name] = n
	}
	return delays, nil
}

// taskDelays gives the delays of *_Task methods to the simulator's tasks, under the names that it has for them. Without
// LockHandoff 0, a task would hold its template's lock while it waits, and clones of one template would queue.
func taskDelays(delays map[string]int) {
	names := map[string]string{
		"CloneVM_Task": "CloneVm", "ReconfigVM_Task": "ReconfigVm", "PowerOnVM_Task": "PowerOn", "PowerOffVM_Task": "PowerOff",
		"Destroy_Task": "Destroy", "RelocateVM_Task": "RelocateVm", "UpgradeVM_Task": "UpgradeVm",
		"CreateSnapshotEx_Task": "CreateSnapshotEx", "ShutdownGuest": "ShutdownGuest",
	}
	tasks := map[string]int{"LockHandoff": 0}
	for method, task := range names {
		if ms, ok := delays[method]; ok {
			tasks[task] = ms
			delete(delays, method)
		}
	}
	simulator.TaskDelay = simulator.DelayConfig{MethodDelay: tasks}
}
