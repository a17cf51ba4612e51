// Pins earlier versions of Cluster API for the tests that install their CustomResourceDefinitions. Nothing is built from it.
module capstan.dev/tools/capi-definitions

go 1.26

require (
	capstan.dev/cluster-api-1.10 v0.0.0
	capstan.dev/cluster-api-1.11 v0.0.0
	capstan.dev/cluster-api-1.12 v0.0.0
	capstan.dev/cluster-api-1.13 v0.0.0
)

replace (
	capstan.dev/cluster-api-1.10 => sigs.k8s.io/cluster-api v1.10.7
	capstan.dev/cluster-api-1.11 => sigs.k8s.io/cluster-api v1.11.1
	capstan.dev/cluster-api-1.12 => sigs.k8s.io/cluster-api v1.12.3
	capstan.dev/cluster-api-1.13 => sigs.k8s.io/cluster-api v1.13.6
)
