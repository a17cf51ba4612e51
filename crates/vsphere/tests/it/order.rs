//! The simulated vCenter refuses a request that a real one refuses: an element out of the WSDL's order, or one that it does not have.
//! So every test against it shows that the client's requests are in order.

use anyhow::Result;
use capstan_testkit::vcsim;
use capstan_testkit::vcsim::Options;

#[tokio::test]
async fn a_request_with_elements_out_of_order_is_refused_with_the_element() -> Result<()> {
    let sim = vcsim(Options::default()).await?;
    let http = reqwest::Client::builder()
        .tls_danger_accept_invalid_certs(true)
        .no_proxy()
        .build()?;
    let login = async |arguments: &str| -> Result<(u16, String)> {
        let body = format!(
            r#"<soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/"><soapenv:Body><Login xmlns="urn:vim25"><_this type="SessionManager">SessionManager</_this>{arguments}</Login></soapenv:Body></soapenv:Envelope>"#
        );
        let sent = http.post(format!("https://{}/sdk", sim.server)).body(body);
        let answer = sent.send().await?;
        Ok((answer.status().as_u16(), answer.text().await?))
    };
    let (user, password) = (
        format!("<userName>{}</userName>", sim.username),
        format!("<password>{}</password>", sim.password),
    );
    assert_eq!(login(&format!("{user}{password}")).await?.0, 200);
    let (status, text) = login(&format!("{password}{user}")).await?;
    assert!(
        status == 400 && text.contains("Login/password is unknown or in the wrong place"),
        "{status} {text}"
    );
    let (status, text) = login(&format!("{user}{password}<token>x</token>")).await?;
    assert!(status == 400 && text.contains("Login/token"), "{status} {text}");
    Ok(())
}
