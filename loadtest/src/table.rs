//! Plain-text table, also valid as Markdown.

/// Rows of cells under a header. The first and the last column are left-aligned, the others right-aligned.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with this header.
    pub(crate) fn new<'a>(header: impl IntoIterator<Item = &'a str>) -> Self {
        Self { rows: vec![header.into_iter().map(str::to_owned).collect()] }
    }

    pub(crate) fn push(&mut self, row: impl IntoIterator<Item = String>) {
        self.rows.push(row.into_iter().collect());
    }

    /// Renders the table.
    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let right = |column: usize| column > 0 && column + 1 < columns;
        let mut out = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            for (column, width) in widths.iter().enumerate() {
                let cell = row.get(column).map_or("", String::as_str);
                match right(column) {
                    true => out.push_str(&format!("| {cell:>width$} ")),
                    false => out.push_str(&format!("| {cell:<width$} ")),
                }
            }
            out.push_str("|\n");
            if number == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let dashes = "-".repeat(*width);
                    out.push_str(&if right(column) { format!("| {dashes}:") } else { format!("| {dashes} ") });
                }
                out.push_str("|\n");
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["run", "n", "notes"]);
        table.push(["a".into(), "10".into(), "x".into()]);
        table.push(["long".into(), "7".into()]);
        let expected = "\
| run  |  n | notes |
| ---- | --:| ----- |
| a    | 10 | x     |
| long |  7 |       |
";
        assert_eq!(table.render(), expected);
    }
}
