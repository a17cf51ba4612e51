//! Lists that are read page by page. Invariant: a page that is beyond the bounds of an answer is asked for again with half as many
//! objects, so that large objects and slow connections cost more requests, and do not fail every time.

use kube::api::{Api, ListParams};

use crate::cache::Object;
use crate::error;

/// Lists what `params` selects, from `page` objects in an answer on, for as long as `take` returns true.
pub(crate) async fn list<K: Object>(
    api: &Api<K>,
    params: ListParams,
    mut page: u32,
    mut take: impl FnMut(Vec<K>) -> bool,
) -> Result<(), kube::Error> {
    let mut params = params.limit(page);
    loop {
        let answer = match api.list(&params).await {
            Ok(answer) => answer,
            Err(error) => {
                page = halved(page, &error).ok_or(error)?;
                params = params.limit(page);
                continue;
            }
        };
        let more = take(answer.items);
        match answer.metadata.continue_.filter(|token| more && !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(()),
        }
    }
}

/// Returns the next smaller page, if the error is about the size of the answer.
pub(crate) fn halved(page: u32, error: &kube::Error) -> Option<u32> {
    error::unbounded(error).map(|_| page / 2).filter(|half| *half > 0)
}
