//! A packet's buffer, by the kernel's helpers: they reach every byte, also those that are not in
//! the buffer's linear part, and keep the checksum state that network cards share with the stack.

use core::{
    mem::{MaybeUninit, size_of},
    ptr::{from_mut, from_ref, null_mut, read_volatile, write_volatile},
};

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::generated::{
        bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh, bpf_skb_adjust_room,
        bpf_skb_change_head, bpf_skb_change_tail, bpf_skb_change_type, bpf_skb_load_bytes,
        bpf_skb_store_bytes, bpf_skb_vlan_pop,
    },
};

/// Length of Ethernet's header.
pub const LINK: u32 = 14;

/// How many bytes [`Skb::make_blank`] removes from a packet's beginning: more than come before the place of the
/// transport checksum in any packet that is answered, link-layer header included.
const REMOVED: u32 = LINK + 48 + 8;

/// `PACKET_HOST` and `PACKET_OTHERHOST` (`include/uapi/linux/if_packet.h`): addressed to this interface; to another
/// host's.
pub const PACKET_HOST: u32 = 0;
pub const PACKET_OTHERHOST: u32 = 3;

/// Ethernet types of VLAN tags (IEEE 802.1Q, 802.1ad).
const ETHERTYPE_VLAN: u16 = 0x8100_u16.to_be();
const ETHERTYPE_SERVICE_VLAN: u16 = 0x88a8_u16.to_be();
/// The bits of a tag that are the VLAN's id. The others are a priority.
const VLAN_ID: u32 = 0xfff;

/// The VLAN to which a packet belongs.
pub type Vlan = u32;
/// The packet belongs to no VLAN. It has no tag, or a tag that is only a priority (VLAN id 0).
pub const NO_VLAN: Vlan = 0;
/// The packet belongs to a VLAN, so the stack delivers it to the VLAN's interface or drops it.
pub const OTHER_VLAN: Vlan = 1;
/// The packet has two tags with VLAN id 0. The stack treats it as a packet without a tag, but the programs cannot read
/// it. No host sends such packets.
pub const NESTED_PRIORITY: Vlan = 2;

/// `tc_index` of a packet that this host's program made for this host: no other program on an interface's way in uses
/// it.
const OWN_ANSWER: u32 = 0xda7a;
/// `tc_index` of a packet that our program sends on, until our program on the way out has seen it.
const SENT_ON: u32 = 0xda7b;
/// `tc_index` of a packet of a flow that our program leaves to the stack.
const LEFT_TO_STACK: u32 = 0xda7d;
/// `tc_index` of a packet of a TCP connection that our program on the way in does not know.
const UNKNOWN: u32 = 0xda7c;
/// `tc_index` of a packet of which our program on the way in wants to know if it leaves as it came ([`super::bypass`]).
const WATCHED: u32 = 0xda7e;

/// The link-layer addresses that Ethernet's header begins with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Link {
    pub to: [u8; 6],
    pub from: [u8; 6],
}

#[derive(Clone, Copy)]
pub struct Skb(pub *mut __sk_buff);

impl Skb {
    /// Length from the link-layer header on.
    #[inline(always)]
    pub fn len(self) -> u32 {
        // SAFETY: a field of the context, as in all the functions below.
        unsafe { read_volatile(&raw const (*self.0).len) }
    }

    /// Where its linear part begins and ends, which can be read without a helper.
    #[inline(always)]
    pub fn linear(self) -> (usize, usize) {
        // SAFETY: see `len`.
        unsafe {
            (
                read_volatile(&raw const (*self.0).data) as usize,
                read_volatile(&raw const (*self.0).data_end) as usize,
            )
        }
    }

    /// `PACKET_HOST` and so on.
    #[inline(always)]
    pub fn kind(self) -> u32 {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).pkt_type) }
    }

    /// Whether the kernel has moved a VLAN tag from the frame to the packet's metadata.
    #[inline(always)]
    pub fn has_tag(self) -> bool {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).vlan_present) != 0 }
    }

    /// Returns the VLAN to which the packet belongs.
    #[inline(always)]
    pub fn vlan(self) -> Vlan {
        if self.has_tag() {
            self.tagged()
        } else {
            NO_VLAN
        }
    }

    /// [`Skb::vlan`] of a packet with a tag.
    ///
    /// The stack treats a packet with VLAN id 0 as if it had no tag, also if a second tag with id 0 follows
    /// (`__netif_receive_skb_core` in `net/core/dev.c`). A second tag is still in the frame.
    #[inline(never)]
    fn tagged(self) -> Vlan {
        // SAFETY: see `len`.
        let tag = unsafe { read_volatile(&raw const (*self.0).vlan_tci) };
        if tag & VLAN_ID != 0 {
            return OTHER_VLAN;
        }
        let ethertype = self.ethertype();
        if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_SERVICE_VLAN {
            return NO_VLAN;
        }
        let mut second = [0_u8; 2];
        if self.load(LINK, &mut second) && u32::from(u16::from_be_bytes(second)) & VLAN_ID != 0 {
            OTHER_VLAN
        } else {
            NESTED_PRIORITY
        }
    }

    /// Removes a VLAN tag with id 0, so that the packet does not leave with it.
    #[inline(always)]
    pub fn remove_tag(self) {
        if self.has_tag() {
            // SAFETY: no memory of ours is involved.
            unsafe { bpf_skb_vlan_pop(self.0) };
        }
    }

    /// The protocol as the stack sees it, in the form of Ethernet's header.
    #[inline(always)]
    pub fn ethertype(self) -> u16 {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).protocol) as u16 }
    }

    /// The mark that an earlier program or rule has set.
    #[inline(always)]
    pub fn mark(self) -> u32 {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).mark) }
    }

    /// The priority of the socket that sends it (`SO_PRIORITY`), unless a later program or rule has changed it.
    #[inline(always)]
    pub fn priority(self) -> u32 {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).priority) }
    }

    /// Adds bits to its mark.
    #[inline(always)]
    pub fn add_mark(self, bits: u32) {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).mark, self.mark() | bits) };
    }

    /// How much data each segment carries if the packet is not segmented yet; 0: it is one packet.
    #[inline(always)]
    pub fn gso_size(self) -> u32 {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).gso_size) }
    }

    /// Whether it came to this host by an interface, and was not sent by the host itself.
    #[inline(always)]
    pub fn is_forwarded(self) -> bool {
        // SAFETY: a field of the context, as it is for the program's whole run.
        unsafe { read_volatile(&raw const (*self.0).ingress_ifindex) != 0 }
    }

    /// The interface it arrived at or leaves by.
    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).ifindex) }
    }

    /// The interface by which a leaving packet came; 0: this host sends it.
    #[inline(always)]
    pub fn ingress(self) -> u32 {
        // SAFETY: as above.
        unsafe { read_volatile(&raw const (*self.0).ingress_ifindex) }
    }

    /// Copies bytes out; `false` if the packet does not have that many.
    #[inline(always)]
    pub fn load<T: Copy>(self, offset: u32, to: &mut T) -> bool {
        // SAFETY: `to` has the size that is passed to the helper.
        unsafe {
            bpf_skb_load_bytes(
                self.0.cast(),
                offset,
                from_mut(to).cast(),
                size_of::<T>() as u32,
            ) == 0
        }
    }

    /// Copies bytes to uninitialised memory: clearing it first takes longer than the copy.
    #[inline(always)]
    pub fn load_new<T: Copy>(self, offset: u32, to: &mut MaybeUninit<T>) -> bool {
        // SAFETY: `to` has the size that is passed to the helper, which fills it even if it fails.
        unsafe {
            bpf_skb_load_bytes(
                self.0.cast(),
                offset,
                to.as_mut_ptr().cast(),
                size_of::<T>() as u32,
            ) == 0
        }
    }

    /// Overwrites bytes. `SUMMED`: also corrects the checksum that a network card made of the whole packet, which is
    /// needed if no other write makes up for the change.
    #[inline(always)]
    pub fn store<T, const SUMMED: bool>(self, offset: u32, from: &T) -> bool {
        let flags = if SUMMED {
            u64::from(BPF_F_RECOMPUTE_CSUM)
        } else {
            0
        };
        // SAFETY: `from` has the size that is passed to the helper.
        unsafe {
            bpf_skb_store_bytes(
                self.0,
                offset,
                from_ref(from).cast(),
                size_of::<T>() as u32,
                flags,
            ) == 0
        }
    }

    /// Adds to the checksum of TCP, UDP or ICMP at `offset`. `PSEUDO`: for a change of the pseudo header; `UDP`: 0
    /// stands for "no checksum", and stays.
    #[inline(always)]
    pub fn sum<const PSEUDO: bool>(self, offset: u32, difference: u32, udp: bool) -> bool {
        let mut flags = 0;
        if PSEUDO {
            flags |= u64::from(BPF_F_PSEUDO_HDR);
        }
        if udp {
            flags |= u64::from(BPF_F_MARK_MANGLED_0);
        }
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_l4_csum_replace(self.0, offset, 0, u64::from(difference), flags) == 0 }
    }

    /// Makes the packet `length` bytes long from its network header on, which begins at `l3`. The caller must then
    /// write the contents.
    ///
    /// Afterwards a network card or the stack no longer writes a checksum into the packet. A packet that this machine
    /// sent, or put together from several packets (GRO), has a position for a transport checksum that is not computed
    /// yet (`CHECKSUM_PARTIAL`). The position stays valid when a program writes there. The kernel drops it when the
    /// bytes before it are removed (`skb_postpull_rcsum` in `include/linux/skbuff.h`, by `bpf_skb_generic_pop` in
    /// `net/core/filter.c`).
    #[inline(always)]
    pub fn make_blank(self, l3: u32, length: u32) -> bool {
        // In this order: the kernel does not shorten a packet whose transport header was removed.
        self.set_length(l3 + REMOVED + length) && self.adjust_room(-REMOVED.cast_signed())
    }

    /// Sets the packet's length, from its link-layer header on.
    #[inline(always)]
    fn set_length(self, len: u32) -> bool {
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_skb_change_tail(self.0, len, 0) == 0 }
    }

    /// Makes room before the network header, or removes bytes there.
    #[inline(always)]
    fn adjust_room(self, len: i32) -> bool {
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_skb_adjust_room(self.0, len, BPF_ADJ_ROOM_MAC, 0) == 0 }
    }

    /// Adds an Ethernet header without addresses to a packet that has none.
    #[inline(always)]
    pub fn add_link(self) -> bool {
        let ethertype = self.ethertype();
        // SAFETY: no memory of ours is involved.
        let added = unsafe { bpf_skb_change_head(self.0, LINK, 0) == 0 };
        added && self.store::<_, false>(LINK - 2, &ethertype)
    }

    /// Marks the packet as addressed to the host that gets it now.
    #[inline(always)]
    pub fn address_to_host(self) {
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_skb_change_type(self.0, PACKET_HOST) };
    }

    /// Whether it is an answer to a socket of this host ([`Skb::send_back`]).
    #[inline(always)]
    pub fn is_own_answer(self) -> bool {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).tc_index) == OWN_ANSWER }
    }

    /// Makes our other programs on this interface leave the packet alone, while the agent changes how they are
    /// attached: it has been translated.
    #[inline(always)]
    pub fn is_for_host(self) {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).tc_index, OWN_ANSWER) };
    }

    /// Makes the packet arrive at another interface of this host, whose program leaves it alone.
    #[inline(always)]
    pub fn arrive_at(self, ifindex: u32) -> i32 {
        self.is_for_host();
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_redirect(ifindex, u64::from(BPF_F_INGRESS)) as i32 }
    }

    /// Marks the packet as sent on by our program ([`Skb::is_sent_by_us`]).
    #[inline(always)]
    pub fn send_on(self) {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).tc_index, SENT_ON) };
    }

    /// Removes the marks of [`Skb::send_on`] and [`Skb::watch`].
    #[inline(always)]
    pub fn forget_marks(self) {
        if self.is_watched() {
            // SAFETY: see `len`.
            unsafe { write_volatile(&raw mut (*self.0).tc_index, 0) };
        }
        self.is_sent_by_us();
    }

    /// Whether our program sends it on, and not the stack. Removes the mark, so no other program sees it.
    #[inline(always)]
    pub fn is_sent_by_us(self) -> bool {
        // SAFETY: see `len`.
        unsafe {
            let is_ours = read_volatile(&raw const (*self.0).tc_index) == SENT_ON;
            if is_ours {
                write_volatile(&raw mut (*self.0).tc_index, 0);
            }
            is_ours
        }
    }

    /// Marks the packet as one of a flow that our program leaves to the stack.
    #[inline(always)]
    pub fn leave_to_stack(self) {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).tc_index, LEFT_TO_STACK) };
    }

    /// Whether our program has left it to the stack. Another program may have removed the mark.
    #[inline(always)]
    pub fn is_left_to_stack(self) -> bool {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).tc_index) == LEFT_TO_STACK }
    }

    /// Marks the packet's connection as unknown to our program ([`Skb::is_unknown`]).
    #[inline(always)]
    pub fn set_unknown(self) {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).tc_index, UNKNOWN) };
    }

    /// Whether our program on the way in did not know the packet's connection.
    #[inline(always)]
    pub fn is_unknown(self) -> bool {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).tc_index) == UNKNOWN }
    }

    /// Makes our program on the way out note the packet ([`super::bypass`]).
    #[inline(always)]
    pub fn watch(self) {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).tc_index, WATCHED) };
    }

    /// Whether our program on the way in wants to know that the packet leaves.
    #[inline(always)]
    pub fn is_watched(self) -> bool {
        // SAFETY: see `len`.
        unsafe { read_volatile(&raw const (*self.0).tc_index) == WATCHED }
    }

    /// Makes the packet arrive at the interface that it was to leave by. Our program there leaves it alone, because it
    /// could not distinguish it from the endpoint's own packets.
    #[inline(always)]
    fn turn_round(self) -> i32 {
        // SAFETY: see `len`.
        unsafe { write_volatile(&raw mut (*self.0).tc_index, OWN_ANSWER) };
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_redirect(self.ifindex(), u64::from(BPF_F_INGRESS)) as i32 }
    }

    /// Sends the packet, whose IP header begins at `l3`, back to where it came from: exchanges the two link-layer
    /// addresses, if it has them. `leaves`: the packet came from this host.
    #[inline(always)]
    pub fn send_back(self, l3: u32, leaves: bool) -> i32 {
        self.remove_tag();
        if l3 == 0 {
            if leaves {
                return self.turn_round();
            }
            // The helper removes an Ethernet header.
            return if self.add_link() {
                send_bare(self.ifindex())
            } else {
                super::DROP
            };
        }
        let mut link = Link {
            to: [0; 6],
            from: [0; 6],
        };
        if !self.load(0, &mut link) {
            return super::DROP;
        }
        let back = Link {
            to: link.from,
            from: link.to,
        };
        if !self.store::<_, false>(0, &back) {
            return super::DROP;
        }
        if leaves {
            return self.turn_round();
        }
        // SAFETY: no memory of ours is involved.
        unsafe { bpf_redirect(self.ifindex(), 0) as i32 }
    }
}

/// Sends the packet by an interface without link-layer headers, along the routes of this interface: a tunnel with many
/// ends (Calico's `tunl0`) looks up the route for the other end.
#[inline(always)]
pub fn send_bare(ifindex: u32) -> i32 {
    // SAFETY: no memory of ours is involved.
    unsafe { bpf_redirect_neigh(ifindex, null_mut(), 0, 0) as i32 }
}

/// The sum of words that lie in a packet.
#[inline(always)]
pub fn sum<const N: usize>(words: &[u32; N]) -> u64 {
    let mut sum = 0;
    for word in words {
        sum += u64::from(*word);
    }
    sum
}

/// Folds a sum of 32-bit words to 32 bits, the form of `bpf_l4_csum_replace` (ones' complement,
/// RFC 1071).
#[inline(always)]
pub fn fold32(sum: u64) -> u32 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    (sum as u32).wrapping_add((sum >> 32) as u32)
}

/// Folds a sum to the 16 bits of a checksum that is not yet complemented.
#[inline(always)]
pub fn fold16(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// The difference that replacing `old` by `new` makes to a sum: `new - old` in ones' complement.
#[inline(always)]
pub fn difference(old: u32, new: u32) -> u64 {
    u64::from(!old) + u64::from(new)
}
