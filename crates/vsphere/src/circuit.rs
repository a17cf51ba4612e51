//! A vCenter that takes calls and leaves them without an answer.
//!
//! Invariant: while it does, one call at a time waits for it and finds out whether that is over. All other calls fail at once,
//! so that machines of other vCenters do not have to wait until all of these have given up.

use parking_lot::Mutex;
use tokio::sync::MutexGuard;

use crate::error::{Error, Result};

#[derive(Default)]
pub(crate) struct Circuit {
    /// The error of the last call that was left without an answer, if none was answered since.
    silence: Mutex<Option<Error>>,
    probe: tokio::sync::Mutex<()>,
}

impl Circuit {
    /// Lets a call through: any while vCenter answers, else one at a time, for as long as it holds the guard.
    pub fn enter(&self) -> Result<Option<MutexGuard<'_, ()>>> {
        match self.silence.lock().as_ref() {
            None => Ok(None),
            Some(silence) => self.probe.try_lock().map(Some).map_err(|_| silence.clone()),
        }
    }

    /// Returns the error of the last call that was left without an answer, if none was answered since.
    pub fn silence(&self) -> Option<Error> {
        self.silence.lock().clone()
    }

    /// A call was not answered in its time.
    pub fn silent(&self, error: &Error) {
        *self.silence.lock() = Some(error.clone());
    }

    pub fn answered(&self) {
        *self.silence.lock() = None;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::in_process::InProcess;
    use crate::rest::{NOTHING, Path};
    use crate::session::{Login, Settings, Trust};
    use crate::soap::Call;
    use crate::vcenter::Vcenter;
    use capstan_core::clock::Clock;
    use capstan_core::vm::MoRef;
    use futures::FutureExt;

    const CONTENT: &str = concat!(
        r#"<RetrieveServiceContentResponse><returnval><rootFolder type="Folder">f</rootFolder>"#,
        r#"<propertyCollector type="PropertyCollector">p</propertyCollector>"#,
        r#"<sessionManager type="SessionManager">s</sessionManager></returnval></RetrieveServiceContentResponse>"#,
    );

    /// Answers everything, but the time of day only while it is not silent.
    #[derive(Default)]
    struct Server {
        silent: AtomicBool,
        asked: AtomicUsize,
    }

    impl Server {
        async fn serve(self: Arc<Self>, mut connection: TcpStream) -> std::io::Result<()> {
            let mut text = String::new();
            let mut buffer = [0; 4096];
            loop {
                while !text.contains("</soapenv:Envelope>") {
                    let read = connection.read(&mut buffer).await?;
                    if read == 0 {
                        return Ok(());
                    }
                    text.push_str(&String::from_utf8_lossy(&buffer[..read]));
                }
                let time = text.contains("<CurrentTime");
                self.asked.fetch_add(usize::from(time), Ordering::SeqCst);
                if time && self.silent.load(Ordering::SeqCst) {
                    return std::future::pending().await;
                }
                let body = if text.contains("<RetrieveServiceContent") {
                    CONTENT
                } else {
                    "<Response/>"
                };
                let body = format!("<Envelope><Body>{body}</Body></Envelope>");
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                connection.write_all(answer.as_bytes()).await?;
                text.clear();
            }
        }
    }

    #[tokio::test]
    async fn a_vcenter_that_swallows_calls_keeps_one_of_many_waiting() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let login = Login {
            server: listener.local_addr().unwrap().to_string(),
            username: "me".into(),
            password: "secret".into(),
            trust: Trust::System,
            tenant: None,
        };
        let server = Arc::new(Server::default());
        let served = server.clone();
        let serving = tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                tokio::spawn(served.clone().serve(connection));
            }
        });
        let base = format!("http://{}", login.server);
        let vcenter = Vcenter::connect_to(base, login, Settings::default()).await.unwrap();
        let service = MoRef::new("ServiceInstance", "ServiceInstance");
        let ask = |seconds| {
            vcenter.call(Call {
                timeout: Duration::from_secs(seconds),
                ..Call::read("CurrentTime", &service, String::new())
            })
        };
        server.silent.store(true, Ordering::SeqCst);
        assert!(matches!(ask(1).await, Err(Error::Unreachable { .. })));
        let all = futures::future::join_all((0..20).map(|_| ask(1))).await;
        assert!(
            all.iter()
                .all(|answer| matches!(answer, Err(Error::Unreachable { .. })))
        );
        assert_eq!(server.asked.load(Ordering::SeqCst), 2, "the others did not wait");
        server.silent.store(false, Ordering::SeqCst);
        ask(60).await.unwrap();
        let all = futures::future::join_all((0..20).map(|_| ask(60))).await;
        assert!(all.iter().all(Result::is_ok), "nobody waits for another any more");
        serving.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_api_that_swallows_calls_keeps_one_of_many_waiting_and_no_soap_call() {
        let (asked, clock) = (Arc::new(AtomicUsize::new(0)), Clock::system());
        let counter = asked.clone();
        let in_process = InProcess::new(move |request| {
            if request.url().path().starts_with("/rest/") {
                counter.fetch_add(1, Ordering::SeqCst);
                return std::future::pending().boxed();
            }
            let text = request.body().and_then(|body| body.as_bytes()).unwrap_or_default();
            let body = match String::from_utf8_lossy(text).contains("<RetrieveServiceContent") {
                true => CONTENT,
                false => "<Response/>",
            };
            let body = format!("<Envelope><Body>{body}</Body></Envelope>");
            async { http::Response::new(body) }.boxed()
        });
        let login = Login {
            server: "vc".into(),
            username: "me".into(),
            password: "secret".into(),
            trust: Trust::System,
            tenant: None,
        };
        let settings = Settings {
            in_process: Some(in_process),
            ..Settings::default()
        };
        let vcenter = Vcenter::connect_to("https://vc".into(), login, settings).await.unwrap();
        let took = async |began| {
            let answer = vcenter
                .rest_list::<String>("GET", &Path::new("/rest/tags"), NOTHING)
                .await;
            assert!(matches!(answer, Err(Error::Unreachable { .. })));
            clock.since(began)
        };
        for (round, patience) in [Duration::from_secs(5), Duration::ZERO, Duration::ZERO]
            .iter()
            .enumerate()
        {
            let began = clock.instant();
            let all = futures::future::join_all((0..20).map(|_| took(began))).await;
            assert_eq!(all.iter().filter(|took| *took > patience).count(), 1, "{all:?}");
            assert_eq!(asked.load(Ordering::SeqCst), round + 1);
            let service = MoRef::new("ServiceInstance", "ServiceInstance");
            let time = vcenter.call(Call::read("CurrentTime", &service, String::new()));
            time.await.unwrap();
        }
    }

    #[test]
    fn while_vcenter_is_silent_one_asks_and_the_others_are_told_at_once() {
        let circuit = Circuit::default();
        let all = || [circuit.enter(), circuit.enter()].map(|entered| entered.is_ok());
        assert_eq!(all(), [true, true]);
        let error = Error::Unreachable {
            server: "vc".into(),
            cause: "timed out".into(),
        };
        circuit.silent(&error);
        {
            let first = circuit.enter();
            assert!(matches!(first, Ok(Some(_))));
            assert!(matches!(circuit.enter(), Err(Error::Unreachable { .. })));
        }
        assert!(
            matches!(circuit.enter(), Ok(Some(_))),
            "the next may ask when the first has given up"
        );
        circuit.answered();
        assert_eq!(all(), [true, true]);
    }
}
