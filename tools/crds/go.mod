// Pins the modules whose CustomResourceDefinitions ours are compared with. Nothing is built from it.
module capstan.dev/tools/crds

go 1.26

require (
	github.com/openshift/api v0.0.0-20260420151639-34e60874783e
	sigs.k8s.io/cluster-api-provider-azure v1.26.0
	sigs.k8s.io/cluster-api-provider-vsphere v1.16.1
)
