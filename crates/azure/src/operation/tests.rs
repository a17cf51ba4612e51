use super::*;
use capstan_core::Classified;
use proptest::prelude::*;
use rstest::rstest;

const RESOURCE: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/m?api-version=1";

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    pairs
        .iter()
        .map(|(name, value)| (http::HeaderName::try_from(*name).unwrap(), value.parse().unwrap()))
        .collect()
}

fn state(state: &str) -> Vec<u8> {
    format!(r#"{{"properties":{{"provisioningState":"{state}"}}}}"#).into_bytes()
}

const NOW: jiff::Timestamp = jiff::Timestamp::UNIX_EPOCH;

const STATUS: (&str, &str) = ("azure-asyncoperation", "https://h/op?t=1");
const LOCATION: (&str, &str) = ("location", "https://h/result");

#[rstest]
#[case::create("PUT", 201, &[STATUS], "Creating", Some("https://h/op?t=1"))]
#[case::update("PUT", 200, &[STATUS], "Updating", Some("https://h/op?t=1"))]
#[case::over_at_once("PUT", 201, &[STATUS], "Succeeded", None)]
#[case::by_state("PUT", 201, &[], "Creating", Some(RESOURCE))]
#[case::delete("DELETE", 202, &[STATUS, LOCATION], "", Some("https://h/op?t=1"))]
#[case::by_location("DELETE", 202, &[LOCATION], "", Some("https://h/result"))]
#[case::created_has_a_location("PUT", 201, &[LOCATION], "Succeeded", None)]
#[case::nothing_to_delete("DELETE", 204, &[], "", None)]
#[case::bare_202("POST", 202, &[], "", Some(RESOURCE))]
fn an_operation_is_followed_where_azure_says(
    #[case] method: &str,
    #[case] status: u16,
    #[case] pairs: &[(&str, &str)],
    #[case] body: &str,
    #[case] address: Option<&str>,
) {
    let body = if body.is_empty() { Vec::new() } else { state(body) };
    let operation = Operation::started(method, RESOURCE, status, &headers(pairs), &body, NOW);
    assert_eq!(operation.as_ref().map(Operation::address), address);
}

#[test]
fn retry_after_is_obeyed_to_the_second() {
    let operation = Operation::started(
        "DELETE",
        RESOURCE,
        202,
        &headers(&[STATUS, ("retry-after", "7")]),
        b"",
        NOW,
    )
    .unwrap();
    assert_eq!(operation.due_in(NOW), Duration::from_secs(7));
    assert_eq!(operation.due_in(jiff::Timestamp::MAX), Duration::ZERO);
    assert_eq!(
        retry_after(&headers(&[("retry-after-ms", "250"), ("retry-after", "9")]), NOW),
        Some(Duration::from_millis(250))
    );
}

#[test]
fn retry_after_may_be_a_date() {
    let now = "2026-11-15T21:00:00Z".parse().unwrap();
    let after = |date: &str| retry_after(&headers(&[("retry-after", date)]), now);
    let later = Some(Duration::from_secs(90));
    assert_eq!(after("Sun, 15 Nov 2026 21:01:30 GMT"), later);
    assert_eq!(after("Sun, 15 Nov 2026 20:00:00 GMT"), Some(Duration::ZERO));
    assert_eq!(after("tomorrow"), None);
}

fn deleting(pairs: &[(&str, &str)]) -> Operation {
    Operation::started("DELETE", RESOURCE, 202, &headers(pairs), b"", NOW).unwrap()
}

#[test]
fn a_failed_operation_keeps_azures_words() {
    let body = r#"{"status":"Failed","error":{"code":"ZonalAllocationFailed","message":"full","target":"zone"}}"#;
    let error = deleting(&[STATUS])
        .answered(200, &HeaderMap::new(), &body.into(), NOW)
        .unwrap_err();
    assert_eq!(error.arm().unwrap().target.as_deref(), Some("zone"));
    assert_eq!(error.class(), capstan_core::Class::Transient);
}

#[test]
fn an_operation_that_azure_forgot_is_judged_by_its_resource() {
    let mut operation = deleting(&[STATUS]);
    assert!(matches!(
        operation.answered(404, &HeaderMap::new(), &Bytes::new(), NOW),
        Ok(Progress::Running(_))
    ));
    assert_eq!(operation.address(), RESOURCE);
    assert!(matches!(
        operation.answered(200, &HeaderMap::new(), &state("Deleting").into(), NOW),
        Ok(Progress::Running(_))
    ));
    assert_eq!(
        operation.answered(404, &HeaderMap::new(), &Bytes::new(), NOW).unwrap(),
        Progress::Done(None)
    );
}

#[rstest]
#[case::succeeded("Succeeded")]
#[case::failed("Failed")]
#[case::canceled("canceled")]
fn a_deletion_that_azure_forgot_and_did_not_carry_out_has_ended_and_is_tried_again(#[case] name: &str) {
    let mut operation = deleting(&[STATUS]);
    operation.answered(404, &HeaderMap::new(), &Bytes::new(), NOW).unwrap();
    let error = operation
        .answered(200, &HeaderMap::new(), &state(name).into(), NOW)
        .unwrap_err();
    assert!(error.ended_operation(), "{error}");
    assert_eq!(error.class(), capstan_core::Class::Transient, "{error}");
}

#[rstest]
#[case::gone(410)]
#[case::refused(400)]
#[case::not_allowed(403)]
fn a_status_that_cannot_be_seen_says_nothing_about_the_work(#[case] status: u16) {
    let creating = headers(&[STATUS]);
    let mut operation = Operation::started("PUT", RESOURCE, 201, &creating, &state("Creating"), NOW).unwrap();
    let refusal: Bytes = r#"{"error":{"code":"X","message":"y"}}"#.into();
    assert!(matches!(
        operation.answered(status, &HeaderMap::new(), &refusal, NOW),
        Ok(Progress::Running(_))
    ));
    assert_eq!(operation.address(), RESOURCE);
    let error = operation
        .answered(status, &HeaderMap::new(), &refusal, NOW)
        .unwrap_err();
    assert!(!error.ended_operation(), "{error}");
    assert_eq!(error.class(), capstan_core::Class::Transient, "{error}");
    assert!(matches!(
        operation.answered(200, &HeaderMap::new(), &state("Succeeded").into(), NOW),
        Ok(Progress::Done(_))
    ));
}

#[test]
fn a_failure_without_a_reason_is_not_the_end() {
    let error = deleting(&[STATUS])
        .answered(200, &HeaderMap::new(), &r#"{"status":"Failed"}"#.into(), NOW)
        .unwrap_err();
    assert!(error.ended_operation());
    assert_eq!(error.class(), capstan_core::Class::Transient, "{error}");
}

#[derive(Clone, Debug)]
enum Reply {
    Running(u64),
    Trouble(u16),
    Forgotten,
}

#[derive(Clone, Debug, PartialEq)]
enum End {
    Done(Option<serde_json::Value>),
    Failed(String),
}

/// Returns the answer of a server with this script to the n-th poll of `operation`.
fn reply(operation: &Operation, script: &[Reply], n: usize, succeeds: bool) -> (u16, HeaderMap, Bytes) {
    let state_body = |name: &str| -> Bytes { state(name).into() };
    match (script.get(n), &operation.follow) {
        (Some(Reply::Trouble(status)), _) => (*status, headers(&[("retry-after", "1")]), Bytes::new()),
        (Some(Reply::Forgotten), Follow::Status(_) | Follow::Location(_)) => (404, HeaderMap::new(), Bytes::new()),
        (Some(Reply::Running(after)), follow) => {
            let head = headers(&[("retry-after", &after.to_string())]);
            match follow {
                Follow::Status(_) => (200, head, r#"{"status":"InProgress"}"#.into()),
                Follow::Location(_) => (202, head, Bytes::new()),
                Follow::Resource => (200, head, state_body("Updating")),
            }
        }
        (Some(Reply::Forgotten), Follow::Resource) => (200, HeaderMap::new(), state_body("Updating")),
        (None, follow) => match (follow, succeeds, operation.method.as_str()) {
            (Follow::Status(_), true, _) => (200, HeaderMap::new(), r#"{"status":"Succeeded"}"#.into()),
            (Follow::Status(_), false, _) => (
                200,
                HeaderMap::new(),
                r#"{"status":"Failed","error":{"code":"X","message":"y"}}"#.into(),
            ),
            (Follow::Location(_), true, _) => (204, HeaderMap::new(), Bytes::new()),
            (Follow::Resource, true, "DELETE") => (404, HeaderMap::new(), Bytes::new()),
            (Follow::Resource, true, _) => (200, HeaderMap::new(), state_body("Succeeded")),
            (Follow::Resource, false, _) => (200, HeaderMap::new(), state_body("Failed")),
            (Follow::Location(_), false, _) => {
                (400, HeaderMap::new(), r#"{"error":{"code":"X","message":"y"}}"#.into())
            }
        },
    }
}

/// Follows the script to its end; at the polls in `crashes` the process dies and another takes up what was written.
fn run(mut operation: Operation, script: &[Reply], succeeds: bool, crashes: &[usize]) -> (End, usize) {
    for n in 0.. {
        let (status, head, body) = reply(&operation, script, n, succeeds);
        let answered = operation.answered(status, &head, &body, NOW);
        if crashes.contains(&n) {
            operation = serde_json::from_str(&serde_json::to_string(&operation).unwrap()).unwrap();
        }
        match answered {
            Ok(Progress::Running(_)) => {}
            Ok(Progress::Done(value)) => return (End::Done(value), n),
            Err(error) if error.ended_operation() => return (End::Failed(error.to_string()), n),
            Err(_) => {}
        }
    }
    unreachable!("the script ends")
}

proptest! {
    #[test]
    fn an_operation_interrupted_at_any_poll_ends_the_same(
        delete in any::<bool>(),
        pairs in prop::sample::select(vec![vec![STATUS], vec![LOCATION], vec![STATUS, LOCATION], vec![]]),
        script in prop::collection::vec(
            prop_oneof![
                4 => (0u64..30).prop_map(Reply::Running),
                1 => prop::sample::select(vec![429u16, 500, 503, 408]).prop_map(Reply::Trouble),
                1 => Just(Reply::Forgotten),
            ],
            0..12,
        ),
        succeeds in any::<bool>(),
        crashes in prop::collection::vec(0usize..13, 0..5),
    ) {
        let method = if delete { "DELETE" } else { "POST" };
        let operation = Operation::started(method, RESOURCE, 202, &headers(&pairs), b"", NOW).unwrap();
        let undisturbed = run(operation.clone(), &script, succeeds, &[]);
        prop_assert_eq!(run(operation, &script, succeeds, &crashes), undisturbed);
    }
}
