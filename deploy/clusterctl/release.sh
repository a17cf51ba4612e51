#!/bin/sh
# Writes the files that clusterctl reads from a repository of providers: for each provider its components, metadata and templates.
#
#   deploy/clusterctl/release.sh FOLDER [VERSION] [IMAGE]
#
# Needs kubectl (KUBECTL names it, if it is not in PATH). FOLDER/clusterctl.yaml is a configuration that names the providers.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 FOLDER [VERSION] [IMAGE]" >&2; exit 2; }
out=$1
version=${2:-v0.1.0}
image=${3:-localhost/capstan:${version#v}}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)

printf 'providers:\n' >"$out/clusterctl.yaml.new"
for provider in azure-pools vsphere; do
    name=capstan-$provider
    folder=$out/infrastructure-$name/$version
    mkdir -p "$folder"
    {
        "${KUBECTL:-kubectl}" kustomize "$here/$provider"
        for definition in "$here/../crds/"*_"${provider%%-*}"*.yaml; do
            printf -- '---\n'
            cat "$definition"
        done
    } | sed -e "s/capstan-system/$name-system/g" -e "s|image: capstan:.*|image: $image|" >"$folder/infrastructure-components.yaml"
    for file in "$here/$provider"/*.yaml; do
        case $file in
        */kustomization.yaml) ;;
        *) cp "$file" "$folder/" ;;
        esac
    done
    cat >>"$out/clusterctl.yaml.new" <<END
- name: $name
  type: InfrastructureProvider
  url: $folder/infrastructure-components.yaml
END
done
mv "$out/clusterctl.yaml.new" "$out/clusterctl.yaml"
echo "$out/clusterctl.yaml"
