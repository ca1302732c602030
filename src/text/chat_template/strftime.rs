//! Dates in chat templates: `strftime_now`, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

pub(super) fn strftime_now(format: String) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime(&format, seconds)
}

/// The directives that templates use, in UTC; an unknown one stays as it is.
fn strftime(format: &str, unix_seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let days = unix_seconds / 86_400;
    let (year, month, day) = civil_from_days(days);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days % 7) as usize]; // 1970-01-01 was a Thursday
    let (hour, minute, second) = (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next();
        let (padded, directive) = if directive == Some('-') { (false, chars.next()) } else { (true, directive) };
        let number = |n: u64| if padded { format!("{n:02}") } else { n.to_string() };
        match directive {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &number(year % 100),
            Some('m') => out += &number(month),
            Some('d') => out += &number(day),
            Some('B') => out += month_name,
            Some('b') => out += &month_name[..3],
            Some('A') => out += day_name,
            Some('a') => out += &day_name[..3],
            Some('H') => out += &number(hour),
            Some('I') => out += &number((hour + 11) % 12 + 1),
            Some('p') => out += if hour < 12 { "AM" } else { "PM" },
            Some('M') => out += &number(minute),
            Some('S') => out += &number(second),
            Some('F') => out += &format!("{year}-{month:02}-{day:02}"),
            Some('T') => out += &format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a count of days since 1970-01-01.
///
/// Source: Howard Hinnant, "chrono-compatible low-level date algorithms"; years run from March so that a leap day comes
/// last.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted() {
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S %A %j%", 951_827_696), "2000-02-29 12:34:56 Tuesday %j%");
        assert_eq!(strftime("%d %b %y %-d %B %a %I%p %%", 1_709_424_000), "03 Mar 24 3 March Sun 12AM %");
    }
}
