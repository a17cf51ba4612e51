//! The simulated vCenter refuses a request that a real one refuses: an element out of the WSDL's order, one that it does not have, or
//! a storage policy in a clone. So every test against it shows that the client's requests are in order.

use anyhow::{Context, Result};
use capstan_testkit::vcsim::Options;
use capstan_testkit::{Vcsim, vcsim};
use capstan_vsphere::{MoRef, Trust, Vcenter};

use crate::vcsim::login;

/// Sends requests as they are written.
struct Raw {
    sim: Vcsim,
    http: reqwest::Client,
    session: String,
}

impl Raw {
    async fn start() -> Result<Self> {
        let http = reqwest::Client::builder().tls_danger_accept_invalid_certs(true);
        Ok(Self {
            sim: vcsim(Options::default()).await?,
            http: http.no_proxy().build()?,
            session: String::new(),
        })
    }

    /// Sends a request to `sdk` or `pbm`; returns the status and the answer.
    async fn send(&mut self, service: &str, method: &str, arguments: &str) -> Result<(u16, String)> {
        let namespace = if service == "pbm" { "urn:pbm" } else { "urn:vim25" };
        let body = format!(
            r#"<soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><soapenv:Body><{method} xmlns="{namespace}">{arguments}</{method}></soapenv:Body></soapenv:Envelope>"#
        );
        let sent = self.http.post(format!("https://{}/{service}", self.sim.server));
        let answer = sent.header("cookie", &self.session).body(body).send().await?;
        if let Some(cookie) = answer.headers().get("set-cookie") {
            let cookie = cookie.to_str()?;
            self.session = cookie.split(';').next().unwrap_or_default().to_owned();
        }
        Ok((answer.status().as_u16(), answer.text().await?))
    }

    async fn login(&mut self, arguments: &str) -> Result<(u16, String)> {
        let manager = r#"<_this type="SessionManager">SessionManager</_this>"#;
        self.send("sdk", "Login", &format!("{manager}{arguments}")).await
    }

    /// The elements of the account.
    fn account(&self) -> (String, String) {
        (
            format!("<userName>{}</userName>", self.sim.username),
            format!("<password>{}</password>", self.sim.password),
        )
    }
}

#[tokio::test]
async fn a_request_with_elements_out_of_order_is_refused_with_the_element() -> Result<()> {
    let mut raw = Raw::start().await?;
    let (user, password) = raw.account();
    assert_eq!(raw.login(&format!("{user}{password}")).await?.0, 200);
    let (status, text) = raw.login(&format!("{password}{user}")).await?;
    assert!(
        status == 400 && text.contains("Login/password is unknown or in the wrong place"),
        "{status} {text}"
    );
    let (status, text) = raw.login(&format!("{user}{password}<token>x</token>")).await?;
    assert!(status == 400 && text.contains("Login/token"), "{status} {text}");
    let content = r#"<_this type="PbmServiceInstance">ServiceInstance</_this><other>x</other>"#;
    let (status, text) = raw.send("pbm", "PbmRetrieveServiceContent", content).await?;
    assert!(
        status == 400 && text.contains("PbmRetrieveServiceContent/other"),
        "{status} {text}"
    );
    Ok(())
}

#[tokio::test]
async fn a_clone_with_a_storage_policy_fails_as_on_a_vcenter_whose_policies_have_data_services() -> Result<()> {
    let mut raw = Raw::start().await?;
    let trust = Trust::Thumbprint(raw.sim.thumbprint.clone());
    let vcenter = Vcenter::connect(login(&raw.sim, trust), Default::default()).await?;
    let datacenter = vcenter.datacenter(None).await?;
    let template = vcenter.template(&datacenter, "pvscsi").await?.reference.clone();
    let (user, password) = raw.account();
    assert_eq!(raw.login(&format!("{user}{password}")).await?.0, 200);
    let clone = format!(
        r#"<_this type="VirtualMachine">{}</_this><folder type="Folder">{}</folder><name>refused</name><spec><location><profile xsi:type="VirtualMachineDefinedProfileSpec"><profileId>gold</profileId></profile></location><template>false</template><powerOn>false</powerOn></spec>"#,
        template.value(),
        datacenter.vm_folder.value()
    );
    let (status, text) = raw.send("sdk", "CloneVM_Task", &clone).await?;
    let task = text.split_once(">task-").and_then(|(_, rest)| rest.split_once('<'));
    let (number, _) = task.with_context(|| format!("{status} {text}"))?;
    let failed = vcenter.task(MoRef::task(&format!("task-{number}"))).wait().await;
    let said = failed.err().context("the clone succeeded")?.to_string();
    assert!(
        said.contains("Storage Policies with Data Service capabilities"),
        "{said}"
    );
    Ok(())
}
