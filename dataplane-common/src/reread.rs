//! Values of hash tables whose elements are used again at once, for other keys (`BPF_F_NO_PREALLOC` since Linux 6.1:
//! `bpf_mem_alloc` in `kernel/bpf/memalloc.c`). A program that holds an element may be preempted, and then find another key's
//! value in it.

/// The result of a search for a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied<V> {
    /// The value.
    Found(V),
    /// The table does not have the key.
    Absent,
    /// The value was replaced during each try.
    Changing,
}

/// How often a value is read again if it was replaced meanwhile.
const TRIES: u32 = 2;

/// Copies the value of a key. `find` looks for the key's element; `read` reads the element's value.
///
/// An update of a hash table puts a new element in the place of the old one, so an element's value stays until the
/// element is reused for another key. The copy counts if the element still belongs to the key and has the same value
/// after it was read: it may have belonged to another key in between, and come back. A reader that is held up at any
/// two moments of a try is not deceived. A reader that is held up three times is, if the element is reused for another
/// key, then for the key, and then again for that other key.
#[inline(always)]
pub fn copy<P: Copy + PartialEq, V: Copy + PartialEq>(
    find: impl Fn() -> Option<P>,
    read: impl Fn(P) -> V,
) -> Copied<V> {
    for _ in 0..TRIES {
        let Some(found) = find() else {
            return Copied::Absent;
        };
        let value = read(found);
        if find() == Some(found) && read(found) == value {
            return Copied::Found(value);
        }
    }
    Copied::Changing
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two elements of a table. Key `MINE` has the value 1 and then 2; any other value belongs to another key.
    #[derive(Clone, Copy, PartialEq)]
    struct Element {
        is_mine: bool,
        value: u32,
    }

    const STRANGERS: u32 = 99;

    /// A change between two steps of a reader: none, the key is removed, an element becomes another key's, or the
    /// key's.
    fn happens(table: &mut [Element; 2], what: usize) {
        let place = what % 2;
        match what / 2 {
            1 => table[place].is_mine = false,
            2 => {
                table[place] = Element {
                    is_mine: false,
                    value: STRANGERS,
                }
            }
            3 => {
                table[1 - place].is_mine = false;
                table[place] = Element {
                    is_mine: true,
                    value: 2,
                };
            }
            _ => {}
        }
    }

    /// Every order of changes at any two of a try's four steps, up to two at each.
    #[test]
    fn nobody_reads_a_strangers_value() {
        use core::cell::{Cell, RefCell};
        let (mut found, mut absent) = (0, 0);
        for schedule in 0..8_usize.pow(6) {
            let steps = [0o7, 0o770, 0o7000, 0o770_000];
            if steps.iter().filter(|&step| schedule & step != 0).count() > 2 {
                continue;
            }
            let first = Element {
                is_mine: true,
                value: 1,
            };
            let free = Element {
                is_mine: false,
                value: STRANGERS,
            };
            let table = RefCell::new([first, free]);
            let left = Cell::new(schedule);
            let step = || {
                let what = left.get() % 8;
                left.set(left.get() / 8);
                happens(&mut table.borrow_mut(), what);
            };
            let find = || {
                step();
                table.borrow().iter().position(|element| element.is_mine)
            };
            let read = |place: usize| {
                step();
                step();
                table.borrow()[place].value
            };
            match copy(find, read) {
                Copied::Found(value) => {
                    assert_ne!(value, STRANGERS, "schedule {schedule:o}");
                    found += 1;
                }
                Copied::Absent => absent += 1,
                Copied::Changing => {}
            }
        }
        assert!(found > 0 && absent > 0);
    }
}
