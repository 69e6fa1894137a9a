//! Typed maps: a hash by system calls, an array as mapped memory.

use std::{
    io,
    marker::PhantomData,
    num::NonZeroUsize,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use aya_obj::generated::bpf_map_type;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::sys::{self, Shape};

/// A type of keys or values: plain bytes both ways.
pub trait Plain: FromBytes + IntoBytes + Immutable + Copy {}
impl<T: FromBytes + IntoBytes + Immutable + Copy> Plain for T {}

#[expect(clippy::cast_possible_truncation, reason = "keys and values are small")]
const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// How many elements one batch call carries: large enough that the call itself costs nothing.
const BATCH: usize = 4096;

/// A hash.
#[derive(Debug)]
pub struct Hash<K, V> {
    fd: OwnedFd,
    capacity: u32,
    types: PhantomData<(K, V)>,
}

impl<K: Plain, V: Plain> Hash<K, V> {
    /// Returns the shape of such a hash.
    pub const fn shape(kind: bpf_map_type) -> Shape {
        Shape {
            kind,
            key_size: size::<K>(),
            value_size: size::<V>(),
            flags: 0,
        }
    }

    /// Returns the shape of a hash whose elements take memory only while they exist (`BPF_F_NO_PREALLOC`).
    pub const fn on_demand() -> Shape {
        Shape {
            flags: 1,
            ..Self::shape(bpf_map_type::BPF_MAP_TYPE_HASH)
        }
    }

    /// Makes one that is pinned nowhere.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn create(name: &str, shape: Shape, capacity: u32) -> io::Result<Self> {
        let fd = sys::map_create(name, &shape, capacity)?;
        Ok(Self {
            fd,
            capacity,
            types: PhantomData,
        })
    }

    /// A map that the caller has checked to be of this shape.
    pub fn from_fd(fd: OwnedFd, capacity: u32) -> Self {
        Self {
            fd,
            capacity,
            types: PhantomData,
        }
    }

    /// Its descriptor.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// How many entries it has room for.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the value of a key, or `None` if the key is absent.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn get(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = V::new_zeroed_bytes();
        if !sys::map_lookup(self.fd.as_fd(), key.as_bytes(), &mut value)? {
            return Ok(None);
        }
        Ok(V::read_from_bytes(&value).ok())
    }

    /// Adds or replaces a key.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, key: &K, value: &V) -> io::Result<()> {
        sys::map_update(self.fd.as_fd(), key.as_bytes(), value.as_bytes(), 0)
    }

    /// Adds a key. Returns `false` if it already exists.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn add(&self, key: &K, value: &V) -> io::Result<bool> {
        const BPF_NOEXIST: u64 = 1;
        match sys::map_update(
            self.fd.as_fd(),
            key.as_bytes(),
            value.as_bytes(),
            BPF_NOEXIST,
        ) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Removes a key; `false` if it was not there.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove(&self, key: &K) -> io::Result<bool> {
        sys::map_delete(self.fd.as_fd(), key.as_bytes())
    }

    /// Adds or replaces many.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_all(&self, keys: &[K], values: &[V]) -> io::Result<()> {
        for (keys, values) in keys.chunks(BATCH).zip(values.chunks(BATCH)) {
            let count = u32::try_from(keys.len()).unwrap_or(u32::MAX);
            sys::map_update_batch(self.fd.as_fd(), keys.as_bytes(), values.as_bytes(), count)
                .map_err(|(_, error)| error)?;
        }
        Ok(())
    }

    /// Removes many, which are all there.
    ///
    /// # Errors
    /// If the kernel refuses, or if a key is not there. The keys before it are removed then.
    pub fn remove_all(&self, keys: &[K]) -> io::Result<()> {
        for keys in keys.chunks(BATCH) {
            let count = u32::try_from(keys.len()).unwrap_or(u32::MAX);
            sys::map_delete_batch(self.fd.as_fd(), keys.as_bytes(), count)?;
        }
        Ok(())
    }

    /// Everything, in no order.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn entries(&self) -> io::Result<Vec<(K, V)>> {
        let mut entries = Vec::new();
        let mut batches = self.batches();
        while batches.read(&mut entries)? {}
        Ok(entries)
    }

    /// Returns all entries, a few thousand at a time.
    ///
    /// Entries that are added or removed meanwhile may or may not be among them; an entry that is there all the time
    /// appears exactly once.
    pub fn batches(&self) -> Batches<'_, K, V> {
        Batches {
            hash: self,
            room: BATCH,
            keys: Vec::new(),
            values: Vec::new(),
            position: None,
            done: false,
        }
    }
}

/// A reader of a whole hash.
#[derive(Debug)]
pub struct Batches<'a, K, V> {
    hash: &'a Hash<K, V>,
    /// A call reads whole buckets, so there must be room for the longest chain.
    room: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
    position: Option<u32>,
    done: bool,
}

impl<K: Plain, V: Plain> Batches<'_, K, V> {
    /// Adds the next entries to `entries`. Returns `false` at the end of the map.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn read(&mut self, entries: &mut Vec<(K, V)>) -> io::Result<bool> {
        if self.done {
            return Ok(false);
        }
        loop {
            self.keys.resize(self.room * size_of::<K>(), 0);
            self.values.resize(self.room * size_of::<V>(), 0);
            let count = u32::try_from(self.room).unwrap_or(u32::MAX);
            let read = sys::map_lookup_batch(
                self.hash.fd.as_fd(),
                self.position,
                &mut self.keys,
                &mut self.values,
                count,
            );
            let (read, next) = match read {
                // There was not, and nothing was read.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    self.room *= 2;
                    continue;
                }
                read => read?,
            };
            let keys = self.keys.chunks_exact(size_of::<K>());
            let values = self.values.chunks_exact(size_of::<V>());
            for (key, value) in keys.zip(values).take(read as usize) {
                if let (Ok(key), Ok(value)) = (K::read_from_bytes(key), V::read_from_bytes(value)) {
                    entries.push((key, value));
                }
            }
            self.position = next;
            self.done = next.is_none();
            return Ok(true);
        }
    }
}

trait ZeroedBytes: Sized {
    fn new_zeroed_bytes() -> Vec<u8> {
        vec![0; size_of::<Self>()]
    }
}
impl<T> ZeroedBytes for T {}

/// An array whose elements are mapped into this process: reads and writes are loads and stores,
/// which the programs see at once.
#[derive(Debug)]
pub struct Mapped<T> {
    fd: OwnedFd,
    memory: NonNull<u8>,
    bytes: NonZeroUsize,
    capacity: u32,
    writable: bool,
    element: PhantomData<T>,
}

// SAFETY: the memory is shared with the kernel anyway; every access goes through volatile or atomic
// loads and stores, and where there are several writers, all are atomic.
unsafe impl<T: Send> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T: Plain> Mapped<T> {
    /// Returns the shape of such an array; `inner`: whether arrays of another size may take its place.
    pub const fn shape(inner: bool) -> Shape {
        const MMAPABLE: u32 = 1 << 10; // BPF_F_MMAPABLE
        const INNER_MAP: u32 = 1 << 12; // BPF_F_INNER_MAP
        // The kernel rounds elements up to eight bytes; ours are multiples of it.
        assert!(size_of::<T>().is_multiple_of(8));
        Shape {
            kind: bpf_map_type::BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: size::<T>(),
            flags: if inner {
                MMAPABLE | INNER_MAP
            } else {
                MMAPABLE
            },
        }
    }

    pub fn create(name: &str, capacity: u32) -> io::Result<Self> {
        Self::map(
            sys::map_create(name, &Self::shape(true), capacity)?,
            capacity,
            true,
        )
    }

    /// Maps an array that the caller has checked to be of this shape.
    pub fn map(fd: OwnedFd, capacity: u32, writable: bool) -> io::Result<Self> {
        let bytes = NonZeroUsize::new((capacity as usize * size_of::<T>()).next_multiple_of(4096))
            .ok_or_else(|| io::Error::other("an array without elements"))?;
        let access = if writable {
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE
        } else {
            ProtFlags::PROT_READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { mmap(None, bytes, access, MapFlags::MAP_SHARED, &fd, 0) }?;
        Ok(Self {
            fd,
            memory: memory.cast(),
            bytes,
            capacity,
            writable,
            element: PhantomData,
        })
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    fn at(&self, index: u32) -> Option<NonNull<T>> {
        if index >= self.capacity {
            return None;
        }
        // SAFETY: within the mapping, by the check above. Elements are aligned to eight bytes, since
        // the mapping is to a page and sizes are multiples of eight.
        Some(unsafe { self.memory.cast::<T>().add(index as usize) })
    }

    /// Reads an element. Words that change together with the programs' view are read by
    /// [`Mapped::word`].
    pub fn get(&self, index: u32) -> Option<T> {
        // SAFETY: in bounds; every bit pattern is a value.
        self.at(index)
            .map(|element| unsafe { element.read_volatile() })
    }

    /// Writes an element, in no particular order of bytes: only for one that no program reads.
    ///
    /// # Panics
    /// If `index` is out of bounds or the mapping is read-only: a fault of ours.
    pub fn set(&self, index: u32, value: T) {
        assert!(
            self.writable,
            "a table that was opened for reading is not written"
        );
        let element = self
            .at(index)
            .expect("tables are made large enough before they are written");
        // SAFETY: in bounds.
        unsafe { element.write_volatile(value) };
    }

    /// One of an element's 8-byte words, for atomic access.
    pub fn word(&self, index: u32, word: usize) -> Option<&AtomicU64> {
        assert!(
            (word + 1) * 8 <= size_of::<T>(),
            "the word is in the element"
        );
        let element = self.at(index)?;
        // SAFETY: in bounds by the assertion and the check in `at`; aligned to eight bytes; lives as
        // long as the mapping, which is as long as `self`.
        Some(unsafe { AtomicU64::from_ptr(element.cast::<u64>().add(word).as_ptr()) })
    }

    /// Adds to a word.
    pub fn add(&self, index: u32, word: usize, amount: u64) {
        if let Some(word) = self.word(index, word) {
            word.fetch_add(amount, Ordering::Relaxed);
        }
    }
}

impl<const N: usize> Mapped<[u64; N]>
where
    [u64; N]: Plain,
{
    /// The words of an element, for atomic access.
    pub fn words(&self, index: u32) -> Option<&[AtomicU64; N]> {
        let element = self.at(index)?;
        // SAFETY: in bounds by the check in `at`; aligned to eight bytes, as the atomic type requires, whose layout is
        // otherwise a word's; lives as long as `self`; every other writer of a word also uses atomic access.
        Some(unsafe { element.cast::<[AtomicU64; N]>().as_ref() })
    }
}

impl<const N: usize> Mapped<[u32; N]>
where
    [u32; N]: Plain,
{
    /// The words of an element, for atomic access.
    pub fn words(&self, index: u32) -> Option<&[AtomicU32; N]> {
        let element = self.at(index)?;
        // SAFETY: as above; the type requires four bytes.
        Some(unsafe { element.cast::<[AtomicU32; N]>().as_ref() })
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nothing refers to any more. An error leaves it mapped.
        let _ = unsafe { munmap(self.memory.cast(), self.bytes.get()) };
    }
}
