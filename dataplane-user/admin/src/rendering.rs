//! One rendering of the metrics for all simultaneous requests, and a limit on renderings that slow readers hold.

use std::{sync::Arc, time::Instant};

use axum::body::Bytes;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

/// Renderings in memory at the same time: the last one, and older ones that clients still read.
const HELD: usize = 4;

/// The last rendering, and places for it and for older ones.
#[derive(Debug)]
pub struct Renderings {
    last: Mutex<Option<Rendering>>,
    places: Arc<Semaphore>,
}

/// The metrics at one moment.
#[derive(Debug)]
struct Rendering {
    began: Instant,
    body: Bytes,
}

/// A rendering's text, and its place until the last reader is done.
struct Held {
    text: String,
    _place: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Default for Renderings {
    fn default() -> Self {
        Self {
            last: Mutex::default(),
            places: Arc::new(Semaphore::new(HELD)),
        }
    }
}

impl Renderings {
    /// Returns a rendering that began after this call, made by `make` or for another caller. While slow readers have
    /// all places, callers get the last rendering. It is at most as old as a connection may become,
    /// because the server then closes the reader's and the place is free.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub async fn get<E>(&self, make: impl AsyncFnOnce() -> Result<String, E>) -> Result<Bytes, E> {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        let is_new = |last: &Rendering| last.began >= asked;
        if let Some(last) = last.as_ref()
            && (is_new(last) || self.places.available_permits() == 0)
        {
            return Ok(last.body.clone());
        }
        // There is a free place, and no other caller takes one while the lock is held. The semaphore is never closed.
        let place = Arc::clone(&self.places).acquire_owned().await;
        let began = Instant::now();
        let text = make().await?;
        let body = match place {
            Ok(place) => Bytes::from_owner(Held {
                text,
                _place: place,
            }),
            Err(_) => text.into(),
        };
        *last = Some(Rendering {
            began,
            body: body.clone(),
        });
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use tokio::{
        task::JoinSet,
        time::{sleep, timeout},
    };

    use super::*;

    /// Renders the number of the rendering, slowly.
    async fn ask(renderings: &Renderings, made: &AtomicUsize) -> Bytes {
        let render = async || {
            sleep(Duration::from_millis(20)).await;
            let number = made.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Infallible>(number.to_string())
        };
        renderings.get(render).await.unwrap()
    }

    #[tokio::test]
    async fn those_that_ask_at_the_same_time_share_a_rendering() {
        let (renderings, made) = (Renderings::default(), AtomicUsize::new(0));
        let (renderings, made) = (Arc::new(renderings), Arc::new(made));
        let mut asking = JoinSet::new();
        for _ in 0..50 {
            let (renderings, made) = (Arc::clone(&renderings), Arc::clone(&made));
            asking.spawn(async move { ask(&renderings, &made).await });
        }
        asking.join_all().await;
        let made_for_fifty = made.load(Ordering::Relaxed);
        assert!(
            made_for_fifty <= 2,
            "{made_for_fifty} for 50 at the same time"
        );
        // A later request gets later figures.
        assert_eq!(ask(&renderings, &made).await, made_for_fifty.to_string());
    }

    #[tokio::test]
    async fn slow_readers_hold_few_renderings_and_keep_nobody_waiting() {
        let (renderings, made) = (Renderings::default(), AtomicUsize::new(0));
        let mut held = vec![];
        for _ in 0..10 {
            let soon = timeout(Duration::from_secs(10), ask(&renderings, &made));
            held.push(soon.await.expect("a reader waits for slow ones"));
        }
        assert_eq!(made.load(Ordering::Relaxed), HELD);
        assert!(held[HELD..].iter().all(|body| body == &held[HELD - 1]));
        // A reader that finishes an older rendering makes room for a new one.
        held.remove(0);
        assert_eq!(ask(&renderings, &made).await, HELD.to_string());
    }

    #[tokio::test]
    async fn a_rendering_that_fails_is_made_again() {
        let renderings = Renderings::default();
        let failed = renderings.get(async || Err("no")).await;
        assert_eq!(failed, Err("no"));
        for _ in 0..HELD * 2 {
            assert!(renderings.get(async || Err("no")).await.is_err());
        }
        let made = renderings
            .get(async || Ok::<_, &str>("yes".to_owned()))
            .await;
        assert_eq!(made.unwrap(), "yes");
    }
}
