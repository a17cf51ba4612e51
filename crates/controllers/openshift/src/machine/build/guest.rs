//! The first settings of a machine's guest.

use super::{Extras, text, word};
use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_azure::model::*;
use capstan_core::machine::names::Names;

/// The user that the image's own provisioning makes.
const ADMIN_USER: &str = "capi";

pub(super) fn os_profile(names: &Names, spec: &AzureMachineProviderSpec, extras: &Extras) -> OsProfile {
    let key = text(&spec.ssh_public_key).map(|key| decoded(&key));
    let windows = spec.os_disk.os_type.eq_ignore_ascii_case("Windows");
    OsProfile {
        computer_name: Some(names.machine.clone()),
        admin_username: Some(ADMIN_USER.into()),
        admin_password: if key.is_none() || windows {
            extras.admin_password.clone()
        } else {
            None
        },
        custom_data: word(Some(&extras.custom_data)),
        linux_configuration: key.filter(|_| !windows).map(|key_data| LinuxConfiguration {
            disable_password_authentication: Some(true),
            ssh: Some(SshConfiguration {
                public_keys: Some(vec![SshPublicKey {
                    path: Some(format!("/home/{ADMIN_USER}/.ssh/authorized_keys")),
                    key_data: Some(key_data),
                    ..SshPublicKey::default()
                }]),
                ..SshConfiguration::default()
            }),
            ..LinuxConfiguration::default()
        }),
        windows_configuration: windows.then(|| WindowsConfiguration {
            enable_automatic_updates: Some(false),
            additional_unattend_content: Some(unattended(extras.admin_password.as_deref().unwrap_or_default())),
            ..WindowsConfiguration::default()
        }),
        ..OsProfile::default()
    }
}

/// Windows does not run custom data by itself: the administrator is logged on once, and that runs it as a script.
fn unattended(password: &str) -> Vec<UnattendContent> {
    let logon = format!(
        "<AutoLogon><Username>{ADMIN_USER}</Username><Password><Value>{password}</Value></Password>\
         <Enabled>true</Enabled><LogonCount>1</LogonCount></AutoLogon>"
    );
    let command = |order: u8, what: &str, line: &str| {
        format!(
            "<SynchronousCommand><Description>{what}</Description><CommandLine>{line}</CommandLine>\
             <Order>{order}</Order></SynchronousCommand>"
        )
    };
    let copy = r#"cmd /c "copy C:\AzureData\CustomData.bin C:\init.ps1""#;
    let run = r"powershell.exe -NonInteractive -ExecutionPolicy Bypass -File C:\init.ps1";
    let commands = command(11, "make the user data a script", copy) + &command(12, "run it", run);
    let setting = |name: &str, content: String| UnattendContent {
        pass_name: Some("OobeSystem".into()),
        component_name: Some("Microsoft-Windows-Shell-Setup".into()),
        setting_name: Some(name.into()),
        content: Some(content),
        ..UnattendContent::default()
    };
    vec![
        setting("AutoLogon", logon),
        setting(
            "FirstLogonCommands",
            format!("<FirstLogonCommands>{commands}</FirstLogonCommands>"),
        ),
    ]
}

/// The spec carries the key base64-encoded; a plain one is taken as it is.
fn decoded(key: &str) -> String {
    use base64::Engine as _;
    let bytes = base64::engine::general_purpose::STANDARD.decode(key.trim()).ok();
    bytes
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .unwrap_or_else(|| key.to_owned())
}
