//! Whose scale set it is. Names prove nothing: two clusters may share a resource group and have pools of the same name.

/// The tag that shows which cluster owns a resource begins so; its value is `owned`. The Azure provider of Cluster API sets it.
pub const CLUSTER_TAG_PREFIX: &str = "sigs.k8s.io_cluster-api-provider-azure_cluster_";
/// The tag that names the pool of a scale set, as `namespace/name`.
pub const POOL_TAG: &str = "capstan-pool";

/// Who a pool is, as the tags of its scale set say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// `None` where the pool has outlived its cluster and nothing names it any more.
    pub cluster: Option<String>,
    /// `namespace/name`
    pub pool: String,
}

impl Claim {
    /// Returns why a scale set with these tags is not the pool's; `None` if it is. A set of the pool's cluster that names no
    /// pool is the pool's: neither the Azure provider of Cluster API nor earlier versions of this program name one.
    pub fn refusal<'a>(&self, tags: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
        let mut pool = None;
        let mut clusters = Vec::new();
        // Azure ignores the case of the names of tags.
        for (name, value) in tags {
            let name = name.to_ascii_lowercase();
            match name.strip_prefix(CLUSTER_TAG_PREFIX) {
                Some(cluster) if value == "owned" => clusters.push(cluster.to_owned()),
                Some(_) => {}
                None if name == POOL_TAG => pool = Some(value),
                None => {}
            }
        }
        if let Some(other) = pool.filter(|pool| *pool != self.pool) {
            return Some(format!("it belongs to pool {other}"));
        }
        match &self.cluster {
            None if pool.is_some() && !clusters.is_empty() => None,
            None => Some("its tags do not name this pool, and the cluster of the pool is not known".to_owned()),
            Some(_) if clusters.is_empty() => Some("it has no tag of a cluster".to_owned()),
            Some(cluster) if !clusters.contains(cluster) => {
                Some(format!("it belongs to cluster {}", clusters.join(", ")))
            }
            Some(_) if pool.is_none() && clusters.len() > 1 => {
                Some(format!("it belongs to more than one cluster: {}", clusters.join(", ")))
            }
            Some(_) => None,
        }
    }

    /// Returns what to do about a scale set that is not the pool's.
    pub fn remedy(&self) -> String {
        let (cluster, pool) = (self.cluster.as_deref().unwrap_or("<cluster>"), &self.pool);
        format!(
            "give the pool another name or another resource group; or, if the scale set is meant for this pool, set its tags \
             {CLUSTER_TAG_PREFIX}{cluster}=owned and {POOL_TAG}={pool} in Azure, and remove those of other clusters"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const A: (&str, &str) = ("sigs.k8s.io_cluster-api-provider-azure_cluster_a", "owned");
    const B: (&str, &str) = ("sigs.k8s.io_cluster-api-provider-azure_cluster_b", "owned");
    const MINE: (&str, &str) = (POOL_TAG, "default/np");
    const OTHER: (&str, &str) = (POOL_TAG, "team-b/np");

    #[rstest]
    #[case::ours(Some("a"), &[A, MINE], None)]
    #[case::made_by_another_program_for_our_cluster(Some("a"), &[A, ("team", "x")], None)]
    #[case::in_another_case(
        Some("a"), &[("Sigs.k8s.io_cluster-api-provider-azure_CLUSTER_a", "owned"), ("Capstan-Pool", "default/np")], None)]
    #[case::taken_over_from_another_cluster(Some("a"), &[A, B, MINE], None)]
    #[case::another_clusters(Some("a"), &[B], Some("belongs to cluster b"))]
    #[case::another_cluster_of_a_similar_name(
        Some("a"), &[("sigs.k8s.io_cluster-api-provider-azure_cluster_ab", "owned")], Some("belongs to cluster ab"))]
    #[case::another_clusters_in_our_name(Some("a"), &[B, MINE], Some("belongs to cluster b"))]
    #[case::another_pools(Some("a"), &[A, OTHER], Some("belongs to pool team-b/np"))]
    #[case::two_clusters(Some("a"), &[A, B], Some("more than one cluster: a, b"))]
    #[case::shared(
        Some("a"), &[("sigs.k8s.io_cluster-api-provider-azure_cluster_a", "shared")], Some("no tag of a cluster"))]
    #[case::nobodys(Some("a"), &[], Some("no tag of a cluster"))]
    #[case::nobodys_in_our_name(Some("a"), &[MINE], Some("no tag of a cluster"))]
    #[case::ours_after_the_cluster_is_forgotten(None, &[B, MINE], None)]
    #[case::unknown_after_the_cluster_is_forgotten(None, &[A], Some("is not known"))]
    fn tags_tell_whose_a_scale_set_is(
        #[case] cluster: Option<&str>,
        #[case] tags: &[(&str, &str)],
        #[case] expected: Option<&str>,
    ) {
        let claim = Claim {
            cluster: cluster.map(str::to_owned),
            pool: "default/np".to_owned(),
        };
        let refusal = claim.refusal(tags.iter().copied());
        match expected {
            None => assert_eq!(refusal, None),
            Some(text) => assert!(refusal.as_ref().is_some_and(|why| why.contains(text)), "{refusal:?}"),
        }
    }
}
