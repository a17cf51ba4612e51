"""Azure's own Python clients against the simulator: every operation that Capstan's controllers rely on.

Reads the simulator's coordinates as JSON from the environment variable SIM and prints one line per thing shown.
"""

import json
import os
import time
import urllib.request
import ssl

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError, ResourceModifiedError, ResourceNotFoundError
from azure.core.rest import HttpRequest
from azure.identity import ClientSecretCredential
from azure.mgmt.compute import ComputeManagementClient
from azure.mgmt.network import NetworkManagementClient

sim = json.loads(os.environ["SIM"])
url, ca, group, location = sim["url"], sim["ca"], sim["resourceGroup"], sim["location"]
subscription = sim["subscription"]

credential = ClientSecretCredential(
    sim["tenant"], sim["clientId"], sim["clientSecret"],
    authority=url, disable_instance_discovery=True, connection_verify=ca,
)
common = dict(base_url=url, connection_verify=ca, credential_scopes=[url + "/.default"], polling_interval=0.2)
compute = ComputeManagementClient(credential, subscription, **common)
network = NetworkManagementClient(credential, subscription, **common)


def admin(method, path, body=None):
    request = urllib.request.Request(url + "/sim/" + path, method=method)
    data = None if body is None else json.dumps(body).encode()
    context = ssl.create_default_context(cafile=ca)
    with urllib.request.urlopen(request, data=data, context=context) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def shown(what):
    print("shown:", what, flush=True)


def refused(call, status, code, message=None, target=None):
    try:
        result = call()
        if hasattr(result, "result"):
            result.result()
    except HttpResponseError as error:
        assert status is None or error.status_code == status, (error.status_code, error)
        assert error.error.code == code, error
        if message:
            assert error.error.message == message, error.error.message
        if target:
            assert error.error.target == target, error.error.target
        return
    raise AssertionError("expected " + code)


# Without Retry-After the clients poll by their own interval; one operation below is followed by Azure's.
admin("PATCH", "settings", {"retryAfter": 0, "networkRetryAfter": 0})

# ---- network -----------------------------------------------------------------------------------------------------

vnet = network.virtual_networks.begin_create_or_update(group, "py-vnet", {
    "location": location, "properties": {"addressSpace": {"addressPrefixes": ["10.9.0.0/16"]}},
}).result()
assert vnet.provisioning_state == "Succeeded" if hasattr(vnet, "provisioning_state") else True
subnet = network.subnets.begin_create_or_update(group, "py-vnet", "nodes", {"properties": {"addressPrefix": "10.9.1.0/24"}}).result()
assert network.subnets.get(group, "py-vnet", "nodes").id == subnet.id
shown("virtual networks and subnets")

nsg = network.network_security_groups.begin_create_or_update(group, "py-nsg", {"location": location}).result()
ip = network.public_ip_addresses.begin_create_or_update(group, "py-ip", {
    "location": location, "sku": {"name": "Standard"}, "properties": {"publicIPAllocationMethod": "Static"},
}).result()
nic_body = {
    "location": location,
    "properties": {
        "networkSecurityGroup": {"id": nsg.id},
        "ipConfigurations": [{"name": "main", "properties": {"subnet": {"id": subnet.id}, "publicIPAddress": {"id": ip.id}}}],
    },
}
nic = network.network_interfaces.begin_create_or_update(group, "py-nic", nic_body).result()
assert nic.ip_configurations[0].private_ip_address
refused(lambda: network.public_ip_addresses.begin_delete(group, "py-ip"), 400, "PublicIPAddressCannotBeDeleted")
refused(lambda: network.network_security_groups.begin_delete(group, "py-nsg"), 400, "InUseNetworkSecurityGroupCannotBeDeleted")
refused(lambda: network.subnets.begin_delete(group, "py-vnet", "nodes"), 400, "InUseSubnetCannotBeDeleted")
shown("network interfaces, public addresses and security groups, none deleted while in use")

lb = network.load_balancers.begin_create_or_update(group, "py-lb", {
    "location": location, "properties": {"backendAddressPools": [{"name": "nodes"}]},
}).result()
assert lb.backend_address_pools[0].id.endswith("/backendAddressPools/nodes")
shown("load balancers")

# ETags: of two writers that read the same, the second is refused.
first = network.network_interfaces.get(group, "py-nic")
headers = {"If-Match": first.etag}
network.network_interfaces.begin_create_or_update(group, "py-nic", nic_body, headers=headers).result()
try:
    network.network_interfaces.begin_create_or_update(group, "py-nic", nic_body, headers=headers).result()
    raise AssertionError("a stale etag was taken")
except HttpResponseError as error:
    assert error.status_code == 412, error
shown("ETag conflict on a network interface: 412")

# ---- virtual machines and disks ----------------------------------------------------------------------------------


def vm_body(**more):
    properties = {
        "hardwareProfile": {"vmSize": "Standard_D4s_v3"},
        "osProfile": {"computerName": "py-vm", "adminUsername": "core", "customData": "aGVsbG8="},
        "storageProfile": {
            "imageReference": {"publisher": "a", "offer": "b", "sku": "c", "version": "latest"},
            "osDisk": {"name": "py-vm_OSDisk", "createOption": "FromImage", "deleteOption": "Delete",
                       "managedDisk": {"storageAccountType": "Premium_LRS"}},
            "dataDisks": more.pop("disks", []),
        },
        "networkProfile": {"networkInterfaces": [{"id": nic.id}]},
    }
    properties.update(more)
    return {"location": location, "zones": ["1"], "properties": properties}


def ultra(**more):
    return {"name": "py-vm_u", "lun": 0, "createOption": "Empty", "diskSizeGB": 128,
            "managedDisk": {"storageAccountType": "UltraSSD_LRS"}, **more}


vms, disks = compute.virtual_machines, compute.disks
refused(lambda: vms.begin_create_or_update(group, "py-vm", vm_body(disks=[ultra()])), 400, "InvalidParameter",
        "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.",
        "managedDisk.storageAccountType")
enabled = {"additionalCapabilities": {"ultraSSDEnabled": True}}
refused(lambda: vms.begin_create_or_update(group, "py-vm", vm_body(disks=[ultra(caching="ReadWrite")], **enabled)), 400,
        "InvalidParameter",
        "Storage Account type UltraSSD_LRS is not supported with caching type ReadWrite. Please use caching type None.",
        "dataDisk.caching")
no_zone = vm_body(disks=[ultra()], **enabled)
del no_zone["zones"]
refused(lambda: vms.begin_create_or_update(group, "py-vm", no_zone), 400, "InvalidParameter",
        "Feature 'UltraSSD' can be used only with Virtual Machines in an Availability Zone.",
        "additionalCapabilities.ultraSSDEnabled")
small = vm_body(disks=[ultra()], hardwareProfile={"vmSize": "Standard_B2s"}, **enabled)
refused(lambda: vms.begin_create_or_update(group, "py-vm", small), 400, "InvalidParameter", None,
        "additionalCapabilities.ultraSSDEnabled")
many = [{"lun": n, "createOption": "Empty", "diskSizeGB": 4} for n in range(9)]
refused(lambda: vms.begin_create_or_update(group, "py-vm", vm_body(disks=many)), 409, "OperationNotAllowed",
        "The maximum number of data disks allowed to be attached to a VM of this size is 8.", "dataDisks")


def ultra_disk(**more):
    return {"location": location, "zones": ["1"], "sku": {"name": "UltraSSD_LRS"},
            "properties": {"creationData": {"createOption": "Empty"}, "diskSizeGB": 64, **more}}


for bad in [{"diskIOPSReadWrite": 64001}, {"diskIOPSReadWrite": 99}, {"diskIOPSReadWrite": 400, "diskMBpsReadWrite": 101}]:
    refused(lambda: disks.begin_create_or_update(group, "py-bad", ultra_disk(**bad)), 400, "InvalidParameter")
assert not [d for d in disks.list_by_resource_group(group)], "a refused VM left a disk behind"
shown("Ultra disks refused with Azure's code, message and target, and nothing left behind")

admin("PATCH", "settings", {"retryAfter": 2})
start = time.time()
poller = vms.begin_create_or_update(group, "py-vm", vm_body(disks=[
    ultra(deleteOption="Delete"),
    {"name": "py-vm_keep", "lun": 1, "createOption": "Empty", "diskSizeGB": 10, "deleteOption": "Detach"},
], **enabled))
vm = poller.result()
assert time.time() - start >= 2, "the operation was polled before its Retry-After"
admin("PATCH", "settings", {"retryAfter": 0})
assert vm.provisioning_state == "Succeeded", vm.provisioning_state
assert vm.os_profile.custom_data is None
view = vms.instance_view(group, "py-vm")
assert [s.code for s in view.statuses] == ["ProvisioningState/succeeded", "PowerState/running"]
disk = disks.get(group, "py-vm_u")
assert (disk.disk_iops_read_write, disk.disk_m_bps_read_write) == (19328, 1038), disk
assert disk.managed_by.lower() == vm.id.lower()
shown("a VM with data disks created, its operation followed, its instance view read")

refused(lambda: network.network_interfaces.begin_delete(group, "py-nic"), 400, "NicInUse")
refused(lambda: disks.begin_delete(group, "py-vm_keep"), 409, "OperationNotAllowed")
shown("interface and disk not deleted while the VM has them")

disk = disks.begin_create_or_update(group, "py-volume", {
    "location": location, "zones": ["1"], "sku": {"name": "UltraSSD_LRS"},
    "properties": {"creationData": {"createOption": "Empty"}, "diskSizeGB": 64, "diskIOPSReadWrite": 5000, "diskMBpsReadWrite": 200},
}).result()
assert disk.provisioning_state == "Succeeded" and disk.disk_state == "Unattached"
refused(lambda: disks.begin_create_or_update(group, "py-bad", {
    "location": location, "zones": ["1"], "sku": {"name": "UltraSSD_LRS"},
    "properties": {"creationData": {"createOption": "Empty"}, "diskSizeGB": 4, "diskIOPSReadWrite": 5000},
}), 400, "InvalidParameter")
attached = [{"lun": d.lun, "createOption": "Attach", "deleteOption": d.delete_option, "managedDisk": {"id": d.managed_disk.id}}
            for d in vm.storage_profile.data_disks]
more = attached + [{"lun": 5, "createOption": "Attach", "managedDisk": {"id": disk.id}}]
vms.begin_update(group, "py-vm", {"properties": {"storageProfile": {"dataDisks": more}}}).result()
assert disks.get(group, "py-volume").disk_state == "Attached"
vms.begin_update(group, "py-vm", {"properties": {"storageProfile": {"dataDisks": attached}}}).result()
assert disks.get(group, "py-volume").disk_state == "Unattached"
disks.begin_update(group, "py-volume", {"properties": {"diskSizeGB": 128}}).result()
disks.begin_delete(group, "py-volume").result()
shown("a disk created, attached to a running VM, detached, grown and deleted")

for action, state in [("begin_deallocate", "deallocated"), ("begin_start", "running"), ("begin_power_off", "stopped"),
                      ("begin_restart", "running")]:
    getattr(vms, action)(group, "py-vm").result()
    assert vms.instance_view(group, "py-vm").statuses[1].code == "PowerState/" + state
shown("deallocate, start, power off, restart")

current = vms.get(group, "py-vm")
vms.begin_create_or_update(group, "py-vm", {"location": location, "tags": {"a": "1"}}, etag=current.etag,
                           match_condition=MatchConditions.IfNotModified).result()
try:
    vms.begin_create_or_update(group, "py-vm", {"location": location}, etag=current.etag,
                               match_condition=MatchConditions.IfNotModified).result()
    raise AssertionError("a stale etag was taken")
except (ResourceModifiedError, HttpResponseError) as error:
    assert error.status_code == 412, error
shown("ETag conflict on a VM: 412")

# 429 with Retry-After: the SDK waits as long as it is told and tries again.
admin("POST", "faults", {"policy": "GetVM", "times": 1, "action": {"kind": "answer", "status": 429, "retryAfter": 2}})
start = time.time()
vms.get(group, "py-vm")
assert time.time() - start >= 2, "Retry-After was not honoured"
shown("429 with Retry-After honoured by the SDK's retry policy")

# Azure's published limits: 36 reads of one VM at once, then one every 5 s.
admin("PATCH", "settings", {"throttle": True})
impatient = ComputeManagementClient(credential, subscription, **common, retry_total=0)
seen = {}
refusal = None
for n in range(400):
    try:
        impatient.virtual_machines.get(group, "py-vm", raw_response_hook=lambda r: seen.update(r.http_response.headers))
    except HttpResponseError as error:
        refusal = error
        refused_at = time.time()
        break
# On a slow machine a token or two come back meanwhile.
assert n >= 36 and refusal.status_code == 429, (n, refusal)
assert refusal.error.details[0].code == "TooManyRequests" and refusal.error.details[0].target == "GetVMResource"
answered = refusal.response.headers
assert 1 <= int(answered["Retry-After"]) <= 5, answered
assert answered["x-ms-ratelimit-remaining-resource"] == "Microsoft.Compute/GetVMResource;0", answered
assert int(seen["x-ms-ratelimit-remaining-subscription-reads"]) < 250, seen
assert seen["x-ms-ratelimit-remaining-resource"].startswith("Microsoft.Compute/GetVMResource;"), seen
vms.get(group, "py-vm")
assert time.time() - refused_at >= int(answered["Retry-After"]) - 1, "the SDK's own retries did not wait"
admin("PATCH", "settings", {"throttle": False})
shown("429 beyond the published limits, with Retry-After and what remains of each bucket")

vms.begin_delete(group, "py-vm").result()
left = sorted(d.name for d in disks.list_by_resource_group(group))
assert left == ["py-vm_keep"], left
try:
    vms.get(group, "py-vm")
    raise AssertionError("the VM is still there")
except ResourceNotFoundError as error:
    assert error.error.code == "ResourceNotFound"
shown("a deleted VM takes what is marked Delete and leaves what is marked Detach")
disks.begin_delete(group, "py-vm_keep").result()
network.network_interfaces.begin_delete(group, "py-nic").result()
network.public_ip_addresses.begin_delete(group, "py-ip").result()

# ---- scale sets ----------------------------------------------------------------------------------------------------

sets, instances = compute.virtual_machine_scale_sets, compute.virtual_machine_scale_set_vms
set_body = {
    "location": location, "zones": ["1", "2", "3"], "sku": {"name": "Standard_D2s_v3", "tier": "Standard", "capacity": 5},
    "properties": {
        "overprovision": False, "upgradePolicy": {"mode": "Manual"}, "singlePlacementGroup": False,
        "virtualMachineProfile": {
            "priority": "Spot", "evictionPolicy": "Delete",
            "osProfile": {"computerNamePrefix": "pypool", "adminUsername": "core", "customData": "aGVsbG8="},
            "storageProfile": {"imageReference": {"id": "/images/1"}, "osDisk": {"createOption": "FromImage"},
                               "dataDisks": [{"lun": 0, "createOption": "Empty", "diskSizeGB": 8}]},
            "networkProfile": {"networkInterfaceConfigurations": [{"name": "nic", "properties": {"primary": True, "ipConfigurations": [
                {"name": "ip", "properties": {"subnet": {"id": subnet.id}}}]}}]},
        },
    },
}
bad = json.loads(json.dumps(set_body))
del bad["zones"]
bad["properties"]["additionalCapabilities"] = {"ultraSSDEnabled": True}
refused(lambda: sets.begin_create_or_update(group, "py-pool", bad), 400, "InvalidParameter",
        "Feature 'UltraSSD' can be used only with Virtual Machine Scale Sets in an Availability Zone.",
        "additionalCapabilities.ultraSSDEnabled")
vmss = sets.begin_create_or_update(group, "py-pool", set_body).result()
assert vmss.provisioning_state == "Succeeded" and vmss.sku.capacity == 5


def living():
    return list(instances.list(group, "py-pool", expand="instanceView"))


admin("PATCH", "settings", {"pageSize": 2})
all_of_them = living()
assert len(all_of_them) == 5 and all(i.latest_model_applied for i in all_of_them)
assert all(i.instance_view.statuses[1].code == "PowerState/running" for i in all_of_them)
assert len(list(instances.list(group, "py-pool").by_page())) == 3, "five instances in pages of two are three pages"
admin("PATCH", "settings", {"pageSize": 200})
shown("a scale set of five, listed with instance views and in pages")

vmss = sets.begin_update(group, "py-pool", {"properties": {"virtualMachineProfile": {"storageProfile": {
    "imageReference": {"id": "/images/2"}}}}}).result()
assert not any(i.latest_model_applied for i in living())
ids = [i.instance_id for i in living()]
sets.begin_update_instances(group, "py-pool", {"instanceIds": ids[:2]}).result()
assert sum(i.latest_model_applied for i in living()) == 2
shown("a model change reaches instances only by manual upgrade")

sets.begin_delete_instances(group, "py-pool", {"instanceIds": ids[2:4]}).result()
assert len(living()) == 3 and sets.get(group, "py-pool").sku.capacity == 3
sets.begin_create_or_update(group, "py-pool", {"location": location, "sku": {"name": "Standard_D2s_v3", "capacity": 4}}).result()
assert len(living()) == 4
refused(lambda: sets.begin_delete_instances(group, "py-pool", {"instanceIds": ["4711"]}), 400, "InvalidParameter")
shown("batched delete and capacity changes")

one = ids[0]
instances.begin_update(group, "py-pool", one, {"location": location, "properties": {"protectionPolicy": {"protectFromScaleIn": True}}}).result()
assert instances.get(group, "py-pool", one).protection_policy.protect_from_scale_in
sets.begin_update(group, "py-pool", {"sku": {"capacity": 1}}).result()
assert [i.instance_id for i in living()] == [one], "the protected instance stays"
sets.begin_reimage(group, "py-pool", {"instanceIds": [one]}).result()
sets.begin_reimage_all(group, "py-pool", {"instanceIds": [one]}).result()
instances.begin_deallocate(group, "py-pool", one).result()
assert instances.get_instance_view(group, "py-pool", one).statuses[1].code == "PowerState/deallocated"
instances.begin_start(group, "py-pool", one).result()
assert sets.get_instance_view(group, "py-pool").virtual_machine.statuses_summary[0].count == 1
nics = list(network.network_interfaces.list_virtual_machine_scale_set_network_interfaces(group, "py-pool"))
assert len(nics) == 1 and nics[0].ip_configurations[0].private_ip_address
shown("protection, scale-in, reimage, reimage all, power, instance views and interfaces of instances")

instances.simulate_eviction(group, "py-pool", one)
deadline = time.time() + 20
while living():
    assert time.time() < deadline, "the spot instance was not evicted"
    time.sleep(0.2)
shown("a spot instance evicted")

sets.begin_delete(group, "py-pool").result()
assert not [s for s in sets.list(group)]
flexible = json.loads(json.dumps(set_body))
flexible["sku"]["capacity"] = 2
flexible["properties"].update({"orchestrationMode": "Flexible", "platformFaultDomainCount": 1})
for name in ["overprovision", "upgradePolicy"]:
    del flexible["properties"][name]
sets.begin_create_or_update(group, "py-flex", flexible).result()
members = [v for v in vms.list(group) if v.virtual_machine_scale_set]
assert len(members) == 2 and all(v.name.startswith("py-flex_") for v in members)
sets.begin_delete(group, "py-flex").result()
assert not list(vms.list(group)) and not list(disks.list_by_resource_group(group))
shown("a Flexible scale set, whose instances are virtual machines")

# ---- failures ------------------------------------------------------------------------------------------------------

admin("POST", "faults", {"action": {"kind": "noCapacity", "zone": "2"}})
refused(lambda: sets.begin_create_or_update(group, "py-full", set_body), None, "ZonalAllocationFailed")
assert sets.get(group, "py-full").provisioning_state == "Failed"
admin("DELETE", "faults")
admin("PATCH", "settings", {"regionalCores": 12})
refused(lambda: sets.begin_create_or_update(group, "py-full", {"location": location, "sku": {"name": "Standard_D2s_v3", "capacity": 50}}),
        409, "OperationNotAllowed")
admin("PATCH", "settings", {"regionalCores": 100000})
sets.begin_delete(group, "py-full").result()
shown("a full zone, and a quota that is used up")

# ---- the rest ------------------------------------------------------------------------------------------------------

skus = [s for s in compute.resource_skus.list(filter="location eq 'eastus'") if s.resource_type == "virtualMachines"]
d4 = next(s for s in skus if s.name == "Standard_D4s_v3")
caps = {c.name: c.value for c in d4.capabilities}
assert caps["MaxDataDiskCount"] == "8" and caps["PremiumIO"] == "True", caps
details = d4.location_info[0].zone_details
assert sorted(details[0].name) == ["1", "2", "3"] and details[0].capabilities[0].name == "UltraSSDAvailable"
shown("resource SKUs with zones and Ultra support")

aset = compute.availability_sets.create_or_update(group, "py-set", {"location": "westus", "sku": {"name": "Aligned"},
                                                                    "properties": {"platformFaultDomainCount": 2}})
assert compute.availability_sets.get(group, "py-set").id == aset.id
compute.availability_sets.delete(group, "py-set")
assert list(compute.usage.list(location))
shown("availability sets and usages")



def arm(method, path, body=None):
    request = HttpRequest(method, url + "/subscriptions/" + subscription + path, params={"api-version": "2021-04-01"}, json=body)
    answer = compute._send_request(request) if hasattr(compute, "_send_request") else compute._client.send_request(request)
    answer.raise_for_status()
    return answer.json() if answer.content else None


assert arm("PUT", "/resourcegroups/py-group", {"location": location, "tags": {"a": "1"}})["properties"]["provisioningState"] == "Succeeded"
assert "py-group" in [g["name"] for g in arm("GET", "/resourcegroups")["value"]]
arm("PATCH", "/resourcegroups/py-group/providers/Microsoft.Resources/tags/default",
    {"operation": "Merge", "properties": {"tags": {"b": "2"}}})
assert arm("GET", "/resourcegroups/py-group")["tags"] == {"a": "1", "b": "2"}
arm("DELETE", "/resourcegroups/py-group")
shown("resource groups and tags, through the SDK's own pipeline")

counters = admin("GET", "counters")
assert counters["signIns"] <= 2, counters["signIns"]
print("signed in %d times for %d calls" % (counters["signIns"], sum(counters["policies"].values())))
print("all shown", flush=True)
