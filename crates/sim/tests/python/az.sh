#!/usr/bin/env bash
# What people do with az, against the simulator whose coordinates are in $SIM.
set -euo pipefail
field() { python3 -c 'import json, os, sys; print(json.loads(os.environ["SIM"])[sys.argv[1]])' "$1"; }
URL=$(field url) GROUP=$(field resourceGroup) SUB=$(field subscription)
export REQUESTS_CA_BUNDLE=$(field ca) AZURE_CORE_COLLECT_TELEMETRY=no AZURE_CORE_ONLY_SHOW_ERRORS=yes
az config set core.instance_discovery=false >/dev/null
az cloud register -n sim --endpoint-resource-manager "$URL" --endpoint-active-directory "$URL" \
  --endpoint-active-directory-resource-id "$URL" --endpoint-active-directory-graph-resource-id "$URL"
az cloud set -n sim
az login --service-principal -u "$(field clientId)" -p "$(field clientSecret)" --tenant "$(field tenant)" >/dev/null
echo "shown: login"

curl -sS --fail --cacert "$REQUESTS_CA_BUNDLE" -X PATCH "$URL/sim/settings" -d '{"retryAfter":1}'
SUBNET="/subscriptions/$SUB/resourceGroups/$GROUP/providers/Microsoft.Network/virtualNetworks/capstan-vnet/subnets/default"
az rest --method put --url "$URL/subscriptions/$SUB/resourceGroups/$GROUP/providers/Microsoft.Compute/virtualMachineScaleSets/pool?api-version=2024-07-01" \
  --resource "$URL" --body '{"location":"eastus","sku":{"name":"Standard_D2s_v3","capacity":2},"properties":{"overprovision":false,
  "upgradePolicy":{"mode":"Manual"},"virtualMachineProfile":{"osProfile":{"computerNamePrefix":"pool","adminUsername":"core"},
  "storageProfile":{"imageReference":{"id":"/images/1"},"osDisk":{"createOption":"FromImage"}},
  "networkProfile":{"networkInterfaceConfigurations":[{"name":"nic","properties":{"primary":true,"ipConfigurations":[
  {"name":"ip","properties":{"subnet":{"id":"'"$SUBNET"'"}}}]}}]}}}}' >/dev/null
sleep 1
test "$(az vmss list -g "$GROUP" --query 'length(@)')" = 1
test "$(az vmss show -g "$GROUP" -n pool --query sku.capacity)" = 2
echo "shown: vmss list, show"
az vmss scale -g "$GROUP" -n pool --new-capacity 3 >/dev/null
test "$(az vmss list-instances -g "$GROUP" -n pool --query 'length(@)')" = 3
echo "shown: vmss scale, list-instances"
az vmss update-instances -g "$GROUP" -n pool --instance-ids '*' >/dev/null
ID=$(az vmss list-instances -g "$GROUP" -n pool --query '[0].instanceId' -o tsv)
az vmss reimage -g "$GROUP" -n pool --instance-ids "$ID" >/dev/null
az vmss delete-instances -g "$GROUP" -n pool --instance-ids "$ID" >/dev/null
test "$(az vmss list-instances -g "$GROUP" -n pool --query 'length(@)')" = 2
echo "shown: vmss update-instances, reimage, delete-instances"
az disk list -g "$GROUP" >/dev/null
az vmss delete -g "$GROUP" -n pool
echo "shown: disk list, vmss delete"
