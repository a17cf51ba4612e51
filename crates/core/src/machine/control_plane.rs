//! One control plane node at a time. etcd survives the loss of one member; a second one, cordoned for a reboot or half
//! deleted, would cost the cluster its quorum.

use jiff::Timestamp;

/// A control plane node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub node: String,
    pub cordoned: bool,
    /// When its machine was deleted, and the machine's name. `None`: it stays.
    pub deleted: Option<(Timestamp, String)>,
}

/// Returns the other node that has to come first, if any. A node whose drain has begun goes on; among those that wait the
/// machine that was deleted first comes first, so two never wait for each other.
pub fn before<'a>(own: &Member, others: &'a [Member]) -> Option<&'a str> {
    let earlier = |other: &Member| match (&other.deleted, &own.deleted) {
        (Some(other), Some(own)) => other < own,
        (Some(_), None) => true,
        (None, _) => false,
    };
    let blocks = |other: &&Member| match (own.cordoned, other.cordoned) {
        (true, true) => earlier(other),
        (true, false) => false,
        (false, true) => true,
        (false, false) => earlier(other),
    };
    let mut blocking: Vec<&str> = others.iter().filter(blocks).map(|other| other.node.as_str()).collect();
    blocking.sort_unstable();
    blocking.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    /// `a+1` is node a, cordoned, deleted at second 1; `b-` is node b, which takes pods and stays.
    fn member(text: &str) -> Member {
        let (node, rest) = text.split_at(1);
        let (cordoned, deleted) = rest.split_at(1);
        let deleted = deleted
            .parse()
            .ok()
            .map(|second| Timestamp::from_second(second).unwrap());
        Member {
            node: node.to_owned(),
            cordoned: cordoned == "+",
            deleted: deleted.map(|at| (at, node.to_owned())),
        }
    }

    #[rstest]
    #[case::alone("a-1", "", None)]
    #[case::others_are_well("a-1", "b- c-", None)]
    #[case::another_is_cordoned_by_hand("a-1", "b- c+", Some("c"))]
    #[case::another_was_deleted_before("a-2", "b-1", Some("b"))]
    #[case::another_was_deleted_after("a-1", "b-2", None)]
    #[case::another_is_being_drained("a-1", "b+2", Some("b"))]
    #[case::our_drain_has_begun("a+1", "b- c+", None)]
    #[case::both_cordoned_by_hand("a+2", "b+1", Some("b"))]
    #[case::at_the_same_time("b-1", "a-1", Some("a"))]
    fn the_next_control_plane_node_waits(#[case] own: &str, #[case] others: &str, #[case] expected: Option<&str>) {
        let others: Vec<Member> = others.split_whitespace().map(member).collect();
        assert_eq!(before(&member(own), &others), expected);
    }

    proptest! {
        #[test]
        fn some_node_always_goes_on(states in proptest::collection::vec((any::<bool>(), 1i64..4), 1..5)) {
            let members: Vec<Member> = states
                .iter()
                .enumerate()
                .map(|(index, (cordoned, second))| {
                    let node = format!("n{index}");
                    let deleted = Some((Timestamp::from_second(*second).unwrap(), node.clone()));
                    Member { node, cordoned: *cordoned, deleted }
                })
                .collect();
            let goes_on = |own: &&Member| {
                let others: Vec<Member> = members.iter().filter(|other| other.node != own.node).cloned().collect();
                before(own, &others).is_none()
            };
            prop_assert!(members.iter().filter(goes_on).count() >= 1, "{:?}", members);
        }
    }
}
