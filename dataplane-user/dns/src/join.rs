//! Answers that begin with our own aliases, and continue with a resolver's records.

use hickory_proto::{
    op::ResponseCode,
    rr::{RData, Record, rdata::CNAME},
};

use super::{
    compose::{bare, to_question},
    name::LowerName,
    wire::{HEADER, IN, Stored, types},
};

/// Builds an answer from our own aliases, and the resolvers' records of the last alias's target. `age`: the seconds
/// since the resolvers answered. The name in the question is ours, so the answer is authoritative (RFC 1035, 4.1.1).
/// SERVFAIL if the records cannot be joined.
pub fn joined(
    (name, of_type): (&LowerName, u16),
    aliases: &[Record],
    theirs: &Stored,
    age: u32,
) -> Stored {
    let read = |bytes: Vec<u8>| Stored::read(&bytes, name, of_type, true).ok();
    let joined = join((name, of_type), aliases, theirs, age).and_then(read);
    joined.unwrap_or_else(|| bare((name, of_type), ResponseCode::ServFail))
}

/// The bytes of [`joined`]. No record is taken apart: an answer may have records that nothing here understands.
fn join(
    (name, of_type): (&LowerName, u16),
    aliases: &[Record],
    theirs: &Stored,
    age: u32,
) -> Option<Vec<u8>> {
    let mut out = to_question(name, of_type).to_vec().ok()?;
    // A code that does not fit into the header is lost with the OPT record.
    out[3] |= u8::try_from(u16::from(theirs.code()))
        .ok()
        .filter(|code| *code < 16)?;
    // The offset of the name of the next record.
    let mut at = HEADER;
    for alias in aliases {
        let RData::CNAME(CNAME(to)) = &alias.data else {
            return None;
        };
        let to = LowerName::of_labels(to.iter()).ok()?;
        out.extend((0xc000 | u16::try_from(at).ok()?).to_be_bytes());
        out.extend(types::CNAME.to_be_bytes());
        out.extend(IN.to_be_bytes());
        out.extend(alias.ttl.to_be_bytes());
        out.extend(u16::try_from(to.bytes().len()).ok()?.to_be_bytes());
        at = out.len();
        out.extend_from_slice(to.bytes());
    }
    theirs.append_to(&mut out, at, age)?;
    let [answers, authorities, additional] = theirs.counts();
    let answers = answers.checked_add(u16::try_from(aliases.len()).ok()?)?;
    for (place, count) in out[6..HEADER]
        .chunks_exact_mut(2)
        .zip([answers, authorities, additional])
    {
        place.copy_from_slice(&count.to_be_bytes());
    }
    // The longest message of TCP.
    u16::try_from(out.len()).is_ok().then_some(out)
}

#[cfg(test)]
mod tests {
    use hickory_proto::{op::Message, rr::RecordType};
    use proptest::prelude::*;

    use super::*;
    use crate::compose::alias;

    fn name(text: &str) -> LowerName {
        LowerName::parse(text).unwrap()
    }

    /// An answer of type MX about `www.example.com`, with these records: the rest of each after its name.
    fn theirs(records: &[(&[u8], &[u8])]) -> Stored {
        let asked = name("www.example.com");
        let mut bytes = vec![0, 0, 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0];
        bytes[7] = u8::try_from(records.len()).unwrap();
        bytes.extend(asked.bytes());
        bytes.extend([0, 15, 0, 1]);
        for (owner, rest) in records {
            bytes.extend([*owner, *rest].concat());
        }
        Stored::read(&bytes, &asked, 15, false).unwrap()
    }

    fn join_with(theirs: &Stored) -> Stored {
        let (asked, middle) = (name("www.shop.svc.cluster.local"), name("www.shop.example"));
        let aliases = [
            alias(&asked, &middle, 5),
            alias(&middle, &name("www.example.com"), 5),
        ];
        joined((&asked, 15), &aliases, theirs, 10)
    }

    #[test]
    fn pointers_lead_to_the_same_names_when_answers_are_joined() {
        // MX 10 mail.example.com; its name is that of the question, and `example.com` is in it.
        let mail = [
            &[0, 15, 0, 1, 0, 0, 0, 60, 0, 9, 0, 10, 4][..],
            b"mail",
            &[0xc0, 16],
        ];
        // The address of the name in the data: 12 + 17 + 4 bytes precede, and 2 + 12 of the record.
        let addr = [0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 25];
        let all = theirs(&[(&[0xc0, 12], &mail.concat()), (&[0xc0, 47], &addr)]);
        let stored = join_with(&all);
        let message = Message::from_vec(stored.bytes()).unwrap();
        let records: Vec<_> = message.answers.iter().map(ToString::to_string).collect();
        assert_eq!(
            records,
            [
                "www.shop.svc.cluster.local. 5 IN CNAME www.shop.example.",
                "www.shop.example. 5 IN CNAME www.example.com.",
                "www.example.com. 50 IN MX 10 mail.example.com.",
                "mail.example.com. 50 IN A 192.0.2.25",
            ]
        );
    }

    #[test]
    fn a_pointer_behind_texts_leads_to_the_same_name() {
        let naptr = [
            &[0, 35, 0, 1, 0, 0, 0, 60, 0, 17, 0, 1, 0, 2, 1, b'u', 3][..],
            b"sip",
            &[0, 3],
            b"sip",
            &[0xc0, 16],
        ]
        .concat();
        let stored = join_with(&theirs(&[(&[0xc0, 12], &naptr)]));
        let message = Message::from_vec(stored.bytes()).unwrap();
        let text = message.answers[2].to_string();
        assert!(text.ends_with("sip.example.com."), "{text}");
    }

    #[test]
    fn records_that_nobody_knows_are_joined_as_they_are() {
        let empty = [255, 1, 0, 1, 0, 0, 0, 60, 0, 0];
        // Bytes that look like pointers, but are not.
        let other = [255, 2, 0, 1, 0, 0, 0, 60, 0, 4, 0xc0, 12, 0xff, 0xff];
        let stored = join_with(&theirs(&[(&[0xc0, 12], &empty), (&[0xc0, 12], &other)]));
        assert_eq!(stored.code(), ResponseCode::NoError);
        assert_eq!(stored.counts(), [4, 0, 0]);
        assert_eq!(
            stored.bytes()[stored.bytes().len() - 10..][..10],
            [0, 0, 0, 50, 0, 4, 0xc0, 12, 0xff, 0xff]
        );
    }

    #[test]
    fn an_answer_that_cannot_be_joined_does_not_say_that_the_name_is_not_there() {
        // A name beyond the reach of pointers, if anything precedes it.
        let long = [&[0, 16, 0, 1, 0, 0, 0, 60, 0x3f, 0xc4][..], &[0; 0x3fc4]].concat();
        let owner = [
            &[1, b'a', 0][..],
            &[0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1],
        ]
        .concat();
        let far = [0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 2];
        let to = 12 + 17 + 4 + 12 + 0x3fc4_u16;
        let all = theirs(&[
            (&[0xc0, 12], &long),
            (&[], &owner),
            (&(0xc000 | to).to_be_bytes(), &far),
        ]);
        assert_eq!(Message::from_vec(all.bytes()).unwrap().answers.len(), 3);
        assert_eq!(join_with(&all).code(), ResponseCode::ServFail);
        // A code that the header has no room for: the upper bits are in the OPT record.
        let mut bytes = theirs(&[]).bytes().to_vec();
        bytes[11] = 1;
        bytes.extend([0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0]);
        let all = Stored::read(&bytes, &name("www.example.com"), 15, false).unwrap();
        assert_eq!(u16::from(all.code()), 16);
        assert_eq!(join_with(&all).code(), ResponseCode::ServFail);
        // An answer that is as long as TCP allows.
        let longest = [
            &[0, 16, 0, 1, 0, 0, 0, 60, 0xff, 0xd2][..],
            &vec![0; 0xffd2],
        ]
        .concat();
        let all = theirs(&[(&[0xc0, 12], &longest)]);
        assert_eq!(all.bytes().len(), usize::from(u16::MAX));
        assert_eq!(join_with(&all).code(), ResponseCode::ServFail);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn whatever_resolvers_send_is_joined_or_servfail(
            changes in proptest::collection::vec((33..110_usize, any::<u8>()), 0..6),
            more in proptest::collection::vec(any::<u8>(), 0..20),
            counts in (0..5_u8, 0..3_u8, 0..3_u8),
        ) {
            let asked = name("www.example.com");
            let mail = [0, 15, 0, 1, 0, 0, 0, 60, 0, 9, 0, 10, 4, b'm', b'a', b'i', b'l', 0xc0, 16];
            let soa = [&[0xc0, 16, 0, 6, 0, 1, 0, 0, 0, 60, 0, 24, 0xc0, 16, 0xc0, 47][..], &[0; 20]].concat();
            let mut bytes = theirs(&[(&[0xc0, 12], &mail), (&[0xc0, 12], &mail), (&[], &soa)]).bytes().to_vec();
            bytes.extend(more);
            let changed = !changes.is_empty();
            for (at, byte) in changes {
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
            (bytes[7], bytes[9], bytes[11]) = (counts.0, counts.1, counts.2);
            let Ok(stored) = Stored::read(&bytes, &asked, 15, false) else { return Ok(()) };
            let joined = join_with(&stored);
            let records = |stored: &Stored, aliases: usize| {
                let message = Message::from_vec(stored.bytes()).ok()?;
                let mut all = [message.answers, message.authorities, message.additionals];
                all[0].drain(..aliases);
                // Times to live are shorter by the age.
                all.iter_mut().flatten().for_each(|record| record.ttl = 0);
                Some(all)
            };
            if joined.code() == ResponseCode::ServFail {
                // Pointers may lead into the header, or nowhere.
                prop_assert!(changed);
                return Ok(());
            }
            // Other types have no pointers, or none that the parser follows. A name whose label is what lies between two
            // names changes with that.
            let is_other = |record: &Record| {
                let is_known = matches!(record.record_type(), RecordType::MX | RecordType::SOA);
                !is_known || record.to_string().contains('\\')
            };
            let parsed = records(&stored, 0);
            if let Some(parsed) = parsed.filter(|all| !all.iter().flatten().any(is_other)) {
                prop_assert_eq!(records(&joined, 2), Some(parsed));
            }
            let [answers, authorities, additional] = stored.counts();
            prop_assert_eq!(joined.counts(), [answers + 2, authorities, additional]);
            let more = |stored: &Stored| join_with(stored).bytes().len() - stored.bytes().len();
            prop_assert_eq!(more(&stored), more(&theirs(&[])));
        }
    }
}
