//! Memory for what servers of others make us keep: the Nodes of workload clusters, the machines of vCenters.
//!
//! Invariant: all holders together hold at most the limit, besides what some of them were told to give up. While not everybody
//! can have what they want, no tenant gets more than its share, and none gets less because others want more: whoever asks
//! within its share gets it, and a tenant that holds more than its share gives something up for it. The share is the largest
//! one with which all shares together fit: what one tenant does not need belongs to the others.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Enough for some 15,000 Nodes in all workload clusters together.
pub const DEFAULT_LIMIT: usize = 48 << 20;

/// The memory of this process for objects of others.
pub struct Memory(Mutex<State>);

impl Default for Memory {
    fn default() -> Self {
        Self::new(DEFAULT_LIMIT)
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} of {} bytes)", self.held(), self.limit())
    }
}

struct State {
    limit: usize,
    tenants: BTreeMap<Arc<str>, Tenant>,
    next: u64,
}

#[derive(Default)]
struct Tenant {
    /// What its holders have together, besides those that were told to give it up.
    bytes: usize,
    holders: BTreeMap<u64, Held>,
}

/// What one holder has.
#[derive(Default)]
struct Held {
    bytes: usize,
    /// Set if the holder can give up what it has.
    tell: Option<Arc<Notify>>,
    /// Whether the holder was told to give up what it has, and has not done it yet.
    told: bool,
}

/// There is no memory left for what a tenant's servers send. The text is the same however much they want.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Capstan has no more memory for what the servers of {tenant} hold: let them hold fewer objects, or start capstan with a \
     larger --foreign-memory"
)]
pub struct Full {
    pub tenant: Arc<str>,
}

impl State {
    /// Returns how many bytes all tenants hold that were not told to give them up.
    fn total(&self) -> usize {
        self.tenants.values().map(|tenant| tenant.bytes).sum()
    }

    fn of(&self, tenant: &str) -> usize {
        self.tenants.get(tenant).map_or(0, |tenant| tenant.bytes)
    }

    fn held(&self, holder: &Holder) -> Option<&Held> {
        self.tenants.get(&holder.tenant)?.holders.get(&holder.id)
    }

    /// Returns the share of each tenant, if `tenant` wants more than that: the limit in equal parts, and what others leave of
    /// theirs in equal parts again.
    fn share(&self, tenant: &str) -> usize {
        let others = self.tenants.iter().filter(|(name, _)| name.as_ref() != tenant);
        let mut others: Vec<usize> = others.map(|(_, tenant)| tenant.bytes).collect();
        others.sort_unstable();
        let mut left = self.limit;
        for (number, held) in others.iter().enumerate() {
            let equal = left / (others.len() - number + 1);
            if *held >= equal {
                return equal;
            }
            left -= held;
        }
        left
    }

    /// Tells the largest holder of the tenant that holds most to give up what it has. Returns whether there was one.
    fn tell(&mut self, share: usize) -> bool {
        let above = self.tenants.values_mut().filter(|tenant| tenant.bytes > share);
        let mut above: Vec<&mut Tenant> = above.collect();
        above.sort_by_key(|tenant| std::cmp::Reverse(tenant.bytes));
        for tenant in above {
            let able = tenant.holders.values_mut().filter(|one| one.bytes > 0 && !one.told);
            let able = able.filter_map(|one| Some((one.tell.clone()?, one)));
            if let Some((tell, largest)) = able.max_by_key(|(_, one)| one.bytes) {
                largest.told = true;
                tenant.bytes -= largest.bytes;
                tell.notify_one();
                return true;
            }
        }
        false
    }

    fn grow(&mut self, tenant: &Arc<str>, id: u64, bytes: usize) -> Result<(), Full> {
        let one = self.tenants.get(tenant).and_then(|tenant| tenant.holders.get(&id));
        let (before, told) = one.map_or((0, false), |one| (one.bytes, one.told));
        let more = bytes - before;
        let own = self.of(tenant) + more;
        let full = || Full { tenant: tenant.clone() };
        if told {
            return Err(full());
        }
        while self.total() + more > self.limit {
            let share = self.share(tenant);
            if own > share || !self.tell(share) {
                return Err(full());
            }
        }
        Ok(())
    }
}

impl Memory {
    pub fn new(limit: usize) -> Self {
        Self(Mutex::new(State {
            limit,
            tenants: BTreeMap::new(),
            next: 0,
        }))
    }

    pub fn limit(&self) -> usize {
        self.0.lock().limit
    }

    /// Returns how many bytes are held, besides those that holders were told to give up.
    pub fn held(&self) -> usize {
        self.0.lock().total()
    }

    /// Returns a holder that keeps what it has until it is dropped.
    pub fn holder(self: &Arc<Self>, tenant: &str) -> Holder {
        self.with(tenant, None)
    }

    /// Returns a holder that can give up what it has whenever [`Holder::told`] returns.
    pub fn giving_holder(self: &Arc<Self>, tenant: &str) -> Holder {
        self.with(tenant, Some(Arc::default()))
    }

    fn with(self: &Arc<Self>, tenant: &str, tell: Option<Arc<Notify>>) -> Holder {
        let tenant: Arc<str> = tenant.into();
        let mut state = self.0.lock();
        let id = state.next;
        state.next += 1;
        let held = Held {
            tell: tell.clone(),
            ..Held::default()
        };
        state
            .tenants
            .entry(tenant.clone())
            .or_default()
            .holders
            .insert(id, held);
        drop(state);
        Holder {
            memory: self.clone(),
            tenant,
            id,
            tell,
        }
    }
}

/// What one cache, one answer or one machine holds; nothing any more when this is dropped.
pub struct Holder {
    memory: Arc<Memory>,
    tenant: Arc<str>,
    id: u64,
    tell: Option<Arc<Notify>>,
}

impl std::fmt::Debug for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Holder({} of {})", self.id, self.tenant)
    }
}

impl Holder {
    /// Changes how many bytes it holds. When it may not have more, it still holds what it had. A holder that was told to give up
    /// what it has gets nothing until it has set this to 0.
    pub fn set(&self, bytes: usize) -> Result<(), Full> {
        let mut state = self.memory.0.lock();
        let before = state.held(self).map_or(0, |one| one.bytes);
        if bytes > before {
            state.grow(&self.tenant, self.id, bytes)?;
        }
        if let Some(tenant) = state.tenants.get_mut(&self.tenant)
            && let Some(one) = tenant.holders.get_mut(&self.id)
        {
            if !one.told {
                tenant.bytes = tenant.bytes - one.bytes + bytes;
            }
            one.bytes = bytes;
            one.told &= bytes > 0;
        }
        Ok(())
    }

    /// Waits until it has to give up what it has, for a tenant that holds less.
    pub async fn told(&self) -> Full {
        loop {
            if let Some(full) = self.is_told() {
                return full;
            }
            match &self.tell {
                Some(tell) => tell.notified().await,
                None => std::future::pending().await,
            }
        }
    }

    /// Returns why it has to give up what it has.
    fn is_told(&self) -> Option<Full> {
        let state = self.memory.0.lock();
        state.held(self)?.told.then(|| Full {
            tenant: self.tenant.clone(),
        })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let mut state = self.memory.0.lock();
        if let Some(tenant) = state.tenants.get_mut(&self.tenant) {
            let held = tenant.holders.remove(&self.id).filter(|one| !one.told);
            tenant.bytes -= held.map_or(0, |one| one.bytes);
            if tenant.holders.is_empty() {
                state.tenants.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn memory(limit: usize) -> Arc<Memory> {
        Arc::new(Memory::new(limit))
    }

    fn is_told(holder: &Holder) -> bool {
        holder.is_told().is_some()
    }

    #[test]
    fn a_tenant_alone_gets_everything_and_no_more() {
        let memory = memory(100);
        let (one, two) = (memory.holder("a"), memory.giving_holder("a"));
        assert_eq!((one.set(60), two.set(40)), (Ok(()), Ok(())));
        assert!(one.set(61).is_err(), "its own holders do not give way to each other");
        assert!(!is_told(&two) && memory.held() == 100);
        drop(one);
        assert_eq!(two.set(100), Ok(()));
        drop(two);
        assert_eq!((memory.held(), memory.0.lock().tenants.len()), (0, 0));
    }

    #[test]
    fn whoever_holds_most_gives_way_to_a_tenant_within_its_share_and_others_do_not_notice() {
        let memory = memory(1000);
        let small: Vec<Holder> = (0..10).map(|n| memory.giving_holder(&format!("small-{n}"))).collect();
        assert!(small.iter().all(|one| one.set(10).is_ok()));
        let hogs: Vec<Holder> = (0..4).map(|n| memory.giving_holder(&format!("hog-{n}"))).collect();
        for (hog, bytes) in hogs.iter().zip([600, 100, 100, 100]) {
            assert_eq!(hog.set(bytes), Ok(()));
        }
        // 700 are left for two of them.
        assert!(hogs[1].set(351).is_err() && !is_told(&hogs[0]));
        assert_eq!(hogs[1].set(350), Ok(()));
        assert!(is_told(&hogs[0]) && hogs[0].set(601).is_err());
        let refused = hogs[1].set(1000).unwrap_err();
        assert_eq!(refused.tenant.as_ref(), "hog-1");
        assert_eq!(small[0].set(20), Ok(()));
        assert!(small.iter().chain(&hogs[1..]).all(|one| !is_told(one)));
        assert_eq!(hogs[0].set(0), Ok(()));
        assert_eq!(hogs[0].set(100), Ok(()), "it gave everything up, and begins again");
    }

    #[test]
    fn a_holder_that_gives_nothing_up_is_not_told() {
        let memory = memory(100);
        let (kept, small) = (memory.holder("a"), memory.holder("b"));
        assert_eq!(kept.set(100), Ok(()));
        assert!(small.set(1).is_err() && !is_told(&kept));
        assert_eq!(kept.set(99), Ok(()));
        assert_eq!(small.set(1), Ok(()));
    }

    #[tokio::test]
    async fn a_holder_that_waits_hears_that_it_has_to_give_way() {
        let memory = memory(100);
        let (hog, small) = (memory.giving_holder("a"), memory.holder("b"));
        assert_eq!(hog.set(100), Ok(()));
        let (full, set) = tokio::join!(hog.told(), async { small.set(10) });
        assert_eq!((full.tenant.as_ref(), set), ("a", Ok(())));
    }

    proptest! {
        #[test]
        fn the_limit_holds_and_a_tenant_within_an_equal_share_always_gets_what_it_asks_for(
            asks in prop::collection::vec((0..6_usize, 0..2_usize, 0..150_usize), 1..100),
        ) {
            let memory = memory(300);
            let holders: Vec<[Holder; 2]> = (0..6).map(|n| [(); 2].map(|()| memory.giving_holder(&format!("t{n}")))).collect();
            let mut held = [[0; 2]; 6];
            for (tenant, which, bytes) in asks {
                let holder = &holders[tenant][which];
                let own: usize = bytes + held[tenant][1 - which];
                match holder.set(bytes) {
                    Ok(()) => held[tenant][which] = bytes,
                    Err(full) => {
                        prop_assert!(own > 300 / 6, "{own} is within an equal share");
                        prop_assert_eq!(full.tenant.as_ref(), format!("t{tenant}"));
                    }
                }
                for (holders, held) in holders.iter().zip(&mut held) {
                    let others = held.iter().sum::<usize>();
                    for (holder, held) in holders.iter().zip(held) {
                        if is_told(holder) {
                            prop_assert!(others > 300 / 6, "it holds no more than an equal share");
                            holder.set(0).unwrap();
                            *held = 0;
                        }
                    }
                }
                prop_assert!(held.iter().flatten().sum::<usize>() <= 300);
                prop_assert_eq!(memory.held(), held.iter().flatten().sum::<usize>());
            }
        }
    }
}
