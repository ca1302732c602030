//! Limits that a process has beside what its machine has (`ulimit`).

/// Address space that this process may still take (`ulimit -v`); `None` without a limit.
pub fn address_space_bytes() -> Option<u64> {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    left(&text("/proc/self/limits"), &text("/proc/self/status"))
}

fn left(limits: &str, status: &str) -> Option<u64> {
    let limit: u64 = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    let used_kib: u64 =
        status.lines().find_map(|line| line.strip_prefix("VmSize:"))?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(limit.saturating_sub(used_kib * 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_counts_against_the_limit() {
        let status = "VmPeak:\t  900 kB\nVmSize:\t  100 kB\n";
        assert_eq!(
            left("Max address space         204800               unlimited            bytes     \n", status),
            Some(102_400)
        );
        assert_eq!(
            left("Max address space         1024                 unlimited            bytes     \n", status),
            Some(0)
        );
        assert_eq!(
            left("Max address space         unlimited            unlimited            bytes     \n", status),
            None
        );
        assert_eq!(left("", ""), None);
    }
}
