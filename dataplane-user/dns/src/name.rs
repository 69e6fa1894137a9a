//! Names as queries have them: labels with their lengths, in lower case.

use std::{fmt, net::IpAddr};

use hickory_proto::rr::Name;

/// The length of the longest name, with the empty label at its end.
pub const MAX: usize = 255;

/// A name in lower case.
///
/// Comparing, hashing and taking it apart costs no allocation.
#[derive(Clone)]
pub struct LowerName {
    bytes: [u8; MAX],
    len: u8,
    /// Offset of each label, that is of its length byte.
    starts: [u8; MAX / 2],
    count: u8,
}

/// A name that is malformed, or longer than names can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a name in DNS")]
pub struct Malformed;

impl LowerName {
    /// Reads the name at `at` of a message, and where it ends. Pointers are malformed: there is nothing before a
    /// question that they could point to.
    ///
    /// # Errors
    ///
    /// The name is malformed, too long, or cut.
    pub fn read(message: &[u8], at: usize) -> Result<(Self, usize), Malformed> {
        let mut name = Self::root();
        name.len = 0;
        let mut at = at;
        loop {
            let length = *message.get(at).ok_or(Malformed)?;
            if length > 63 {
                return Err(Malformed);
            }
            let end = at + 1 + usize::from(length);
            let label = message.get(at + 1..end).ok_or(Malformed)?;
            name.push(label)?;
            at = end;
            if length == 0 {
                return Ok((name, at));
            }
        }
    }

    /// Reads a name as people write it, with or without a dot at its end.
    ///
    /// # Errors
    ///
    /// A label is empty or too long, or the name is.
    pub fn parse(text: &str) -> Result<Self, Malformed> {
        let text = text.strip_suffix('.').unwrap_or(text);
        let labels = text.split('.').map(str::as_bytes);
        let labels = labels.filter(|_| !text.is_empty());
        Self::of_labels(labels)
    }

    /// Joins labels.
    ///
    /// # Errors
    ///
    /// A label is empty or too long, or the name is.
    pub fn of_labels<'a>(labels: impl Iterator<Item = &'a [u8]>) -> Result<Self, Malformed> {
        let mut name = Self::root();
        name.len = 0;
        for label in labels {
            if label.is_empty() || label.len() > 63 {
                return Err(Malformed);
            }
            name.push(label)?;
        }
        name.push(&[])?;
        Ok(name)
    }

    /// The name without labels.
    pub fn root() -> Self {
        Self {
            bytes: [0; MAX],
            len: 1,
            starts: [0; MAX / 2],
            count: 0,
        }
    }

    /// Adds a label of at most 63 bytes; the empty one ends the name.
    fn push(&mut self, label: &[u8]) -> Result<(), Malformed> {
        let start = usize::from(self.len);
        let end = start + 1 + label.len();
        if end > MAX {
            return Err(Malformed);
        }
        let (Ok(length), Ok(to)) = (u8::try_from(label.len()), u8::try_from(end)) else {
            return Err(Malformed);
        };
        self.bytes[start] = length;
        for (to, from) in self.bytes[start + 1..end].iter_mut().zip(label) {
            *to = from.to_ascii_lowercase();
        }
        if !label.is_empty() {
            self.starts[usize::from(self.count)] = self.len;
            self.count += 1;
        }
        self.len = to;
        Ok(())
    }

    /// The name's bytes: labels with their lengths, and the empty label.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// How many labels it has, without the empty one.
    pub fn count(&self) -> usize {
        usize::from(self.count)
    }

    /// Its label number `at`, from the left.
    pub fn label(&self, at: usize) -> &[u8] {
        if at >= self.count() {
            return &[];
        }
        let start = usize::from(self.starts[at]);
        let length = usize::from(self.bytes[start]);
        &self.bytes[start + 1..=start + length]
    }

    /// Its labels, from the left.
    pub fn labels(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.count()).map(|at| self.label(at))
    }

    /// The name as text without a dot at its end, in this buffer; none if a label is not text, or has a dot in it.
    pub fn text<'a>(&self, buffer: &'a mut [u8; MAX]) -> Option<&'a str> {
        let starts = &self.starts[..self.count()];
        if self.labels().any(|label| label.contains(&b'.')) {
            return None;
        }
        let end = usize::from(self.len).saturating_sub(2);
        let text = &mut buffer[..end];
        text.copy_from_slice(self.bytes.get(1..=end)?);
        for start in starts.iter().skip(1) {
            text[usize::from(*start) - 1] = b'.';
        }
        str::from_utf8(text).ok()
    }

    /// How many labels are before `end`, if the name ends with it.
    pub fn before(&self, end: &Self) -> Option<usize> {
        let before = self.count().checked_sub(end.count())?;
        let start = match self.starts[..self.count()].get(before) {
            Some(start) => usize::from(*start),
            None => self.bytes().len() - 1,
        };
        (self.bytes()[start..] == *end.bytes()).then_some(before)
    }

    /// Its last `count` labels; none if it has fewer.
    pub fn last(&self, count: usize) -> Option<Self> {
        let from = self.count().checked_sub(count)?;
        Self::of_labels(self.labels().skip(from)).ok()
    }

    /// Returns the name's first `count` labels, followed by another name.
    ///
    /// # Errors
    ///
    /// The resulting name would be too long.
    pub fn with_end(&self, count: usize, end: &Self) -> Result<Self, Malformed> {
        Self::of_labels(self.labels().take(count).chain(end.labels()))
    }

    /// The same name for composing messages.
    pub fn to_name(&self) -> Name {
        let mut name = Name::from_labels(self.labels()).unwrap_or_else(|_| Name::root());
        name.set_fqdn(true);
        name
    }

    /// The address of a name below `in-addr.arpa` or `ip6.arpa`; none if it is something else, or only the beginning of
    /// an address.
    pub fn address(&self) -> Option<IpAddr> {
        let count = self.count();
        let (zone, root) = (count.checked_sub(2)?, count - 1);
        if self.label(root) != b"arpa" {
            return None;
        }
        match (self.label(zone), zone) {
            (b"in-addr", 4) => {
                let mut bytes = [0; 4];
                for (to, at) in bytes.iter_mut().zip((0..4).rev()) {
                    let label = self.label(at);
                    let canonical = label == b"0" || !label.starts_with(b"0");
                    let text = str::from_utf8(label).ok().filter(|_| canonical)?;
                    *to = text.parse().ok()?;
                }
                Some(IpAddr::from(bytes))
            }
            (b"ip6", 32) => {
                let mut bytes = [0_u8; 16];
                for (nibble, at) in (0..32).rev().enumerate() {
                    let [digit] = self.label(at) else { return None };
                    let digit = u8::try_from(char::from(*digit).to_digit(16)?).ok()?;
                    bytes[nibble / 2] = bytes[nibble / 2] << 4 | digit;
                }
                Some(IpAddr::from(bytes))
            }
            _ => None,
        }
    }
}

impl PartialEq for LowerName {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for LowerName {}

/// Prints the name with a dot at its end, and with `\123` for unprintable bytes.
impl fmt::Display for LowerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count == 0 {
            return f.write_str(".");
        }
        for label in self.labels() {
            for byte in label {
                match byte {
                    b'.' | b'\\' => write!(f, "\\{}", char::from(*byte))?,
                    b'!'..=b'~' => write!(f, "{}", char::from(*byte))?,
                    other => write!(f, "\\{other:03}")?,
                }
            }
            f.write_str(".")?;
        }
        Ok(())
    }
}

impl fmt::Debug for LowerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> LowerName {
        LowerName::parse(text).unwrap()
    }

    #[test]
    fn names_are_compared_in_lower_case_and_label_by_label() {
        let zone = name("Cluster.LOCAL.");
        assert_eq!(zone, name("cluster.local"));
        assert_eq!(name("web.shop.svc.cluster.local").before(&zone), Some(3));
        assert_eq!(zone.before(&zone), Some(0));
        assert_eq!(name("local").before(&zone), None);
        assert_eq!(name("xcluster.local").before(&zone), None);
        assert_eq!(zone.before(&LowerName::root()), Some(2));
        let other = name("web.shop.svc.cluster.local").with_end(1, &name("example.com"));
        assert_eq!(other.unwrap().to_string(), "web.example.com.");
    }

    #[test]
    fn a_name_is_text_unless_a_label_is_not() {
        let buffer = &mut [0; MAX];
        for text in ["www.example.com", "com", "", "a.b.c.d.e"] {
            assert_eq!(name(text).text(buffer), Some(text));
        }
        let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
        assert_eq!(name(&longest).text(buffer), Some(&*longest));
        for labels in [[&b"www.example"[..], b"com"], [b"\xff", b"com"]] {
            let name = LowerName::of_labels(labels.into_iter()).unwrap();
            assert_eq!(name.text(buffer), None);
        }
    }

    #[test]
    fn addresses_are_read_backwards() {
        for (text, addr) in [
            ("1.0.3.10.in-addr.arpa", Some("10.3.0.1")),
            ("0.3.10.in-addr.arpa", None),
            ("01.0.3.10.in-addr.arpa", None),
            ("256.0.3.10.in-addr.arpa", None),
            ("x.1.0.3.10.in-addr.arpa", None),
            (
                "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa",
                Some("2001:db8::1"),
            ),
            ("1.0.0.2.ip6.arpa", None),
            ("in-addr.arpa", None),
            ("arpa", None),
            (".", None),
        ] {
            let addr: Option<IpAddr> = addr.map(|addr| addr.parse().unwrap());
            assert_eq!(name(text).address(), addr, "{text}");
        }
    }

    #[test]
    fn the_longest_name_fits_and_no_longer_one() {
        let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "a".repeat(61));
        let bytes = name(&longest).bytes().to_vec();
        assert_eq!(bytes.len(), MAX);
        assert_eq!(LowerName::read(&bytes, 0), Ok((name(&longest), MAX)));
        for length in [64, 65, 0xc0] {
            let label = [&[length][..], &vec![b'a'; length.into()], &[0]].concat();
            assert_eq!(LowerName::read(&label, 0), Err(Malformed), "{length}");
        }
        assert!(LowerName::parse(&format!("{longest}a")).is_err());
        assert!(LowerName::parse(&"a".repeat(64)).is_err());
        let many = vec!["a"; 127].join(".");
        assert_eq!(name(&many).count(), 127);
        assert!(LowerName::parse(&format!("a.{many}")).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300), at in 0..300_usize) {
            if let Ok((name, end)) = LowerName::read(&bytes, at) {
                prop_assert!(end <= bytes.len());
                prop_assert_eq!(name.bytes(), bytes[at..end].to_ascii_lowercase());
                prop_assert_eq!(LowerName::of_labels(name.labels()).unwrap(), name.clone());
                prop_assert_eq!(name.to_name().to_lowercase().iter().count(), name.count());
            }
        }
    }
}
